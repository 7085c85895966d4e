"""All KV caches of one verifier: admission, capabilities, leases."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from paceline.kv.selection import SelectionPolicy
from paceline.service import limits
from paceline.verifier.engine.job import CachedSequence, EngineJob, Request
from paceline.verifier.engine.queue import PrefixCache
from paceline.verifier.kv.base import TapLayout, open_segments, round_up
from paceline.verifier.kv.pool import PagePool
from paceline.verifier.kv.segment import SegmentMemory

CAPABILITY_BYTES = 16

WAIT_SECONDS = 30.0  # longest wait of a request for memory. Then its client is told to come again.

_FIRST_EXPECTED = 256  # output tokens expected of a generation before any has ended

_NEWEST_SHARE = 1 / 16  # weight of the newest output in the running mean of lengths

_log = logging.getLogger(__name__)
FreeSequence = Callable[[CachedSequence], Awaitable[None]]  # ends a sequence when no step uses it

KvMemory = SegmentMemory | PagePool  # KV memory of all sequences, taken as they grow


@dataclass(slots=True)
class RequestTimes:
    """Times of one generation (time.perf_counter)."""

    began: float
    first: float = 0.0
    newest: float = 0.0
    tokens: int = 0
    ended: bool = False

    def emitted(self, tokens: int) -> None:
        """Count tokens that were emitted now."""
        self.newest = time.perf_counter()
        if not self.tokens:
            self.first = self.newest
        self.tokens += tokens


class Cache:
    """A sequence with its capabilities, its lease and its newest job.

    Used on the event loop. Its sequence and segment belong to the engine thread while a job of it
    runs. Only ``CacheStore.release`` frees it: first it invalidates the capabilities, then the
    engine unmaps the segment between two steps.
    """

    def __init__(self, sequence: CachedSequence, epoch: int, expected_bytes: int = 0) -> None:
        # Capability to generate (16 random bytes).
        self.handle = secrets.token_bytes(CAPABILITY_BYTES)
        # Capability that only lets its holder read committed KV (16 random bytes).
        self.read_grant = secrets.token_bytes(CAPABILITY_BYTES)
        self.sequence = sequence
        # Memory that it was expected to need when it was admitted. Unit: bytes.
        self.expected_bytes = expected_bytes
        # Number of the cache, different for every cache of a process. A reader that finds another
        # number than before must discard what it read.
        self.epoch = epoch
        self.expires = 0.0  # when the lease ends (the store's clock)
        self.used = 0.0  # when it was renewed last
        self.job: EngineJob | None = None  # its newest job; None before the first
        # The task that serves its Generate stream; a newer stream replaces it.
        self.stream: object | None = None
        self.released = False  # whether its capabilities are invalid
        # Selection policies whose scores begin with the prompt, by name and layers, until they are
        # followed.
        self.policies: dict[tuple[str, tuple[int, ...]], SelectionPolicy] = {}
        self.request: RequestTimes | None = None  # its times, if metrics are kept
        self.rounds = 0  # rounds that were traced
        sequence.read_grant = self.read_grant
        sequence.kv.header.open(epoch)

    @property
    def owner(self) -> str:
        """The client that created it; the handle is valid for this client only."""
        return self.sequence.owner

    @property
    def claimed_bytes(self) -> int:
        """Memory that it has or is expected to need. Unit: bytes."""
        reserved = self.sequence.kv.reserved_bytes
        return reserved if self.sequence.finish is not None else max(reserved, self.expected_bytes)

    @property
    def busy(self) -> bool:
        """Whether the engine runs a job of it, or has one waiting."""
        return self.job is not None and not self.job.done


def digest(capability: bytes) -> bytes:
    """Return a capability's SHA-256, its lookup key: the time of a lookup reveals nothing."""
    return hashlib.sha256(capability).digest()


class NoRoom(Exception):
    """A request waited too long for memory, or too many wait."""


class AdmissionQueue:
    """Lets requests wait for memory, and learns how much a generation is expected to need.

    Requests are admitted in order of arrival, but generations that were released for lack of
    memory go first. No request is passed by another one, so a long text is not kept waiting by
    short ones. Used on the event loop.
    """

    def __init__(self) -> None:
        """Make an empty queue."""
        # Running mean of the lengths of outputs. Unit: tokens.
        self.expected_output = float(_FIRST_EXPECTED)
        self._waiting: list[tuple[bool, int]] = []
        self._tickets = count()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Requests that wait for memory now."""
        return len(self._waiting)

    def expected_length(self, request: Request) -> int:
        """Return how many tokens a generation is expected to have at its end."""
        expected = request.text.given + math.ceil(self.expected_output)
        return min(expected, request.text.limit)

    def ended(self, sequence: CachedSequence) -> None:
        """Learn from the length of a generation that has ended."""
        if sequence.finish is not None:
            output = sequence.text.output_length
            self.expected_output += _NEWEST_SHARE * (output - self.expected_output)

    async def wait(self, request: Request, has_room: Callable[[], bool]) -> None:
        """Wait until it is a request's turn and there is room for it. Raises ``NoRoom`` if it
        waited too long, or too many wait."""
        if len(self._waiting) >= limits.WAITING_FOR_MEMORY:
            raise NoRoom(f"{len(self._waiting)} requests wait for KV memory")
        ticket = (request.text.given == request.text.prompt_length, next(self._tickets))
        self._waiting.append(ticket)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while ticket != min(self._waiting) or not has_room():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoRoom(f"there was no KV memory for {WAIT_SECONDS:g} seconds") from None
        finally:
            self._waiting.remove(ticket)
            self.wake()

    def wake(self) -> None:
        """Have waiting requests look for memory again."""
        self._changed.set()


class StoreFull(Exception):
    """There is no memory for a cache."""

    def __init__(self, message: str, *, forever: bool = False) -> None:
        super().__init__(message)
        self.forever = forever  # whether the cache would not fit into an empty store either


class CacheNotFound(Exception):
    """The capability is unknown, has expired, or is another client's."""


class CacheStore:
    """Admits, finds, renews and frees caches. Used on the event loop.

    Memory is taken as texts grow, and admission counts each text at its expected length. Where
    that was too little, ``make_room()`` releases the youngest generation.

    A lease is the least lifetime of an unused cache. Every use of the handle renews it, and so does
    a running job; ``sweep()`` frees caches whose lease expired.
    """

    def __init__(
        self,
        memory: KvMemory,
        free: FreeSequence,
        *,
        max_sequences: int,
        lease_seconds: float,
        prefixes: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty store; ``free`` ends a sequence, ``prefixes`` are the ended texts that the
        engine keeps. Unit of ``lease_seconds`` and of the clock, which is monotonic: seconds."""
        self.memory = memory  # KV memory
        self.prefixes = PrefixCache(0) if prefixes is None else prefixes
        self.lease_seconds = lease_seconds
        self.max_sequences = max_sequences
        self.admission = AdmissionQueue()  # requests that wait for memory
        self.expired = 0  # number of caches that `sweep()` freed
        # Called with each released cache and the error that ended its generation, or "".
        self.on_release: Callable[[Cache, str], None] | None = None
        self._free = free
        self._clock = clock
        self._caches: dict[bytes, Cache] = {}
        self._grants: dict[bytes, Cache] = {}
        self._releasing: dict[Cache, asyncio.Task[None]] = {}
        self._epochs = count(1)
        self._preempting = asyncio.Lock()
        self._freed_at = 0.0

    def __len__(self) -> int:
        """Return the number of caches that hold memory."""
        return len(self._caches) + len(self._releasing)

    def __iter__(self) -> Iterator[Cache]:
        """Return caches whose handles are valid."""
        return iter(list(self._caches.values()))

    async def admit(self, request: Request, owner: str) -> Cache:
        """Create a cache as soon as the generation is expected to fit beside the others. ``owner``
        may use its handle. Hidden states that
        have no room beside the longest text are not kept: its drafter is told so, and the text goes
        on without drafts. Raises ``StoreFull`` if there is not enough memory, or there are too many
        caches; ``OutOfMemory``: the machine cannot map it."""
        capacity = self.memory.layout.capacity(request.text.limit)
        taps = None
        if request.taps is not None:
            taps = TapLayout.of(request.taps, self.memory.layout, capacity)
            if self.memory.bytes_of(capacity, taps) > self.memory.limit_bytes:
                taps, request = None, replace(request, taps=None)
        needed = self.memory.bytes_of(capacity, taps)
        if needed > self.memory.limit_bytes:
            raise StoreFull(
                f"prompt and output need {needed} bytes of KV, but the "
                f"verifier has {self.memory.limit_bytes} in total; shorten the prompt or lower "
                "max_new_tokens",
                forever=True,
            )
        expected = self.memory.bytes_of(round_up(self.admission.expected_length(request)), taps)
        try:
            await self.admission.wait(request, lambda: self._has_room(expected))
        except NoRoom as error:
            raise StoreFull(
                f"{error}: {len(self)} of {self.max_sequences} sequences have "
                f"{self.claimed_bytes} of {self.memory.limit_bytes} bytes, and this one needs "
                f"{expected}; try again later"
            ) from error
        sequence = CachedSequence(request, self.memory.allocate(capacity, taps), owner)
        cache = Cache(sequence, next(self._epochs), expected)
        self._caches[digest(cache.handle)] = cache
        self._grants[digest(cache.read_grant)] = cache
        self.renew(cache)
        return cache

    def _has_room(self, expected: int) -> bool:
        fits = self.claimed_bytes + expected <= self.memory.limit_bytes
        return fits and len(self) < self.max_sequences

    @property
    def claimed_bytes(self) -> int:
        """Memory that caches have or are expected to need. Unit: bytes."""
        return sum(cache.claimed_bytes for cache in (*self._caches.values(), *self._releasing))

    def find(self, handle: bytes, owner: str) -> Cache:
        """Return the cache of a handle. Renews its lease. Raises ``CacheNotFound`` if the handle is
        unknown, or another client's."""
        cache = self._caches.get(digest(handle))
        if cache is None or cache.owner != owner:
            raise CacheNotFound("no cache has this handle: it was released, or its lease expired")
        self.renew(cache)
        return cache

    def find_granted(self, read_grant: bytes) -> Cache:
        """Return the cache of a read grant, for any caller: a drafter is not the cache's owner.

        Does not renew the lease. Raises ``CacheNotFound`` if the grant is unknown, or the lease
        expired.
        """
        cache = self._grants.get(digest(read_grant))
        if cache is None or self._expired(cache):
            raise CacheNotFound("no cache has this read grant")
        return cache

    def _expired(self, cache: Cache) -> bool:
        return not cache.busy and self._clock() >= cache.expires

    def renew(self, cache: Cache, seconds: float | None = None) -> None:
        """Renew a cache's lease; ``seconds`` is its length, if it is not the usual one."""
        cache.used = self._clock()
        cache.expires = cache.used + (self.lease_seconds if seconds is None else seconds)

    async def release_abandoned(self) -> None:
        """Free the caches of texts that have not ended and that nobody has read for a while."""
        since = self._clock() - limits.ABANDONED_SECONDS
        for cache in self:
            unread = cache.stream is None and not cache.busy and cache.used < since
            if unread and cache.sequence.finish is None and not cache.released:
                await self.release(cache, "abandoned")

    async def release(self, cache: Cache, error: str = "") -> None:
        """Invalidate the capabilities at once, and free the memory when no step uses it.

        A second call only waits. A cancelled call frees the memory too. ``error`` names the fault
        that ended the generation; empty: none did.
        """
        if not cache.released:
            cache.released = True
            del self._caches[digest(cache.handle)]
            del self._grants[digest(cache.read_grant)]
            if cache.job is not None:
                cache.job.cancelled = True
            self.admission.ended(cache.sequence)
            if self.on_release is not None:
                self.on_release(cache, error)
            self._releasing[cache] = asyncio.create_task(self._reclaim(cache))
            cache.sequence.notify_listeners()
        if cache in self._releasing:
            await asyncio.shield(self._releasing[cache])

    async def make_room(self, since: float) -> None:
        """Release the youngest unfinished generation, unless memory was freed since a time of
        perf_counter, when the job that found none began to wait for its step.

        Its client creates its cache again when there is memory; the tokens are the same. The oldest
        is never released, so one generation always comes to its end.
        """
        async with self._preempting:
            if self._freed_at > since:
                return
            unfinished = [cache for cache in self if cache.sequence.finish is None]
            if len(unfinished) > 1:
                youngest = max(unfinished, key=lambda cache: cache.epoch)
                await self.release(youngest, "preempted")

    async def wait_released(self) -> None:
        """Wait for running releases."""
        await asyncio.gather(*self._releasing.values())

    async def close(self) -> None:
        """Release every cache."""
        for cache in self:
            await self.release(cache)

    async def _reclaim(self, cache: Cache) -> None:
        await self._free(cache.sequence)
        del self._releasing[cache]
        self._freed_at = time.perf_counter()
        self.admission.wake()

    async def sweep(self) -> int:
        """Free every cache whose lease expired, and renew leases of busy ones; return how many
        were freed."""
        expired: list[Cache] = []
        freed = 0
        for cache in self:
            if cache.busy:
                self.renew(cache)
            elif self._expired(cache):
                expired.append(cache)
        for cache in expired:
            if cache.released or not self._expired(cache):
                continue  # released or used while another one was freed
            _log.info("lease expired", extra={"epoch": cache.epoch})
            self.expired += 1
            freed += 1
            await self.release(cache, "lease_expired")
        return freed

    @property
    def unfinished(self) -> int:
        """Caches whose generation has not ended."""
        return sum(cache.sequence.finish is None for cache in self)

    def check_integrity(self) -> None:
        """Check that no memory and no descriptor leaked, while no job and no release runs. Raises
        ``AssertionError`` if an invariant is broken; the message names all that are."""
        caches = list(self)
        kvs = [sequence.kv for sequence in (*(cache.sequence for cache in caches), *self.prefixes)]
        files = [kv.file for kv in kvs]
        grants = {id(cache) for cache in self._grants.values()}
        broken = [
            f"cache {cache.epoch}: {rule}"
            for cache in caches
            for rule, kept in _invariants(cache).items()
            if not kept
        ]
        if self._releasing:
            broken.append(f"{len(self._releasing)} caches are still being released")
        if len(set(files)) != len(files):
            broken.append("two caches share a segment")
        if differing := sorted(set(files) ^ open_segments()):
            broken.append(f"segments and caches differ: descriptors {differing}")
        used, reserved = self.memory.used_bytes, sum(kv.reserved_bytes for kv in kvs)
        if used > self.memory.limit_bytes:
            broken.append(f"{used} bytes are used, limit {self.memory.limit_bytes}")
        if isinstance(self.memory, SegmentMemory) and used != reserved:
            broken.append(f"{used} bytes accounted, {reserved} reserved")
        if grants != {id(cache) for cache in caches}:
            broken.append("handles and read grants name different caches")
        if broken:
            raise AssertionError("; ".join(broken))


def _invariants(cache: Cache) -> dict[str, bool]:
    """Return whether each invariant is kept, by the message for a broken one."""
    sequence, kv = cache.sequence, cache.sequence.kv
    return {
        "its segment is closed": not kv.closed,
        "it was released": not cache.released,
        "its header differs": kv.closed
        or (kv.header.epoch, kv.header.committed) == (cache.epoch, sequence.committed),
        "committed beyond what is reserved": sequence.committed <= kv.reserved,
        "reserved beyond its capacity": kv.reserved <= kv.capacity,
        "text and history differ": len(sequence.history) == len(sequence.tokens),
        "its anchor is not the newest token": sequence.prefilling
        or sequence.committed == len(sequence.tokens) - 1,
        "longer than its limit": len(sequence.tokens) <= sequence.text.limit,
    }
