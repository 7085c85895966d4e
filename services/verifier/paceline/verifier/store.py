"""All KV caches of one verifier: admission, capabilities, leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Protocol

from paceline.verifier.admission import Admission, NoRoom
from paceline.verifier.cache import Cache, digest
from paceline.verifier.engine.prefixes import PrefixCache
from paceline.verifier.engine.sequence import GenerationParams, Sequence
from paceline.verifier.kv.base import SequenceKv, open_segments
from paceline.verifier.kv.layout import KvLayout, round_up
from paceline.verifier.kv.segment import SegmentMemory
from paceline.verifier.kv.taps import TapLayout

_log = logging.getLogger(__name__)

FreeSequence = Callable[[Sequence], Awaitable[None]]
"""Ends a sequence when no step uses it."""


class KvMemory(Protocol):
    """KV memory of all sequences, taken as they grow: ``SegmentMemory`` or ``PagePool``."""

    layout: KvLayout

    @property
    def limit_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    def allocate(self, capacity: int, taps: TapLayout | None) -> SequenceKv: ...


class StoreFull(Exception):
    """There is no memory for a cache.

    Attributes:
        forever: Whether the cache would not fit into an empty store either.
    """

    def __init__(self, message: str, *, forever: bool = False) -> None:
        super().__init__(message)
        self.forever = forever


class CacheNotFound(Exception):
    """The capability is unknown, has expired, or is another client's."""


class CacheStore:
    """Admits, finds, renews and frees caches. Used on the event loop.

    Memory is taken as texts grow, and admission counts each text at its expected length. Where
    that was too little, ``make_room()`` releases the youngest generation.

    A lease is the least lifetime of an unused cache. Every use of the handle renews it, and so does
    a running job; ``sweep()`` frees caches whose lease expired.

    Attributes:
        memory: KV memory.
        admission: Requests that wait for memory.
        expired: Number of caches that ``sweep()`` freed.
        on_release: Called with each released cache and the error that ended its generation, or "".
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
        """Make an empty store.

        Args:
            memory: KV memory of all caches.
            free: Ends a sequence; the engine's ``release``.
            max_sequences: Maximum number of caches.
            lease_seconds: Lifetime of a cache without use. Unit: seconds.
            prefixes: Ended texts that the engine keeps; None: none.
            clock: Monotonic clock. Unit: seconds.
        """
        self.memory = memory
        self.prefixes = PrefixCache(0) if prefixes is None else prefixes
        self.lease_seconds = lease_seconds
        self.max_sequences = max_sequences
        self.admission = Admission()
        self.expired = 0
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
        """Number of caches that hold memory."""
        return len(self._caches) + len(self._releasing)

    def __iter__(self) -> Iterator[Cache]:
        """Caches whose handles are valid."""
        return iter(list(self._caches.values()))

    async def admit(self, generation: GenerationParams, owner: str) -> Cache:
        """Create a cache as soon as the generation is expected to fit beside the others.

        Raises:
            StoreFull: There is not enough memory, or there are too many caches.
            OutOfMemory: The machine cannot map it.
        """
        capacity = self.memory.layout.capacity(generation.length_limit)
        taps = None
        if generation.taps is not None:
            taps = TapLayout.of(generation.taps, self.memory.layout, capacity)
        if self._bytes_of(capacity, taps) > self.memory.limit_bytes:
            raise StoreFull(
                f"prompt and output need {self._bytes_of(capacity, taps)} bytes of KV, but the "
                f"verifier has {self.memory.limit_bytes} in total; shorten the prompt or lower "
                "max_new_tokens",
                forever=True,
            )
        expected = self._bytes_of(round_up(self.admission.expected_length(generation)), taps)
        try:
            await self.admission.wait(generation, lambda: self._has_room(expected))
        except NoRoom as error:
            raise StoreFull(
                f"{error}: {len(self)} of {self.max_sequences} sequences have "
                f"{self.claimed_bytes} of {self.memory.limit_bytes} bytes, and this one needs "
                f"{expected}; try again later"
            ) from error
        sequence = Sequence(generation, self.memory.allocate(capacity, taps), owner)
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

    def _bytes_of(self, slots: int, taps: TapLayout | None) -> int:
        """Memory of so many slots and their hidden states. Unit: bytes."""
        rows = 0 if taps is None else taps.bytes_of(slots)
        return slots * self.memory.layout.token_bytes + rows

    def find(self, handle: bytes, owner: str) -> Cache:
        """The cache of a handle. Renews its lease.

        Raises:
            CacheNotFound: The handle is unknown, or another client's.
        """
        cache = self._caches.get(digest(handle))
        if cache is None or cache.owner != owner:
            raise CacheNotFound("no cache has this handle: it was released, or its lease expired")
        self.renew(cache)
        return cache

    def find_granted(self, read_grant: bytes) -> Cache:
        """The cache of a read grant, for any caller: a drafter is not the cache's owner.

        Does not renew the lease.

        Raises:
            CacheNotFound: The grant is unknown, or the lease expired.
        """
        cache = self._grants.get(digest(read_grant))
        if cache is None or self._expired(cache):
            raise CacheNotFound("no cache has this read grant")
        return cache

    def _expired(self, cache: Cache) -> bool:
        return not cache.busy and self._clock() >= cache.expires

    def renew(self, cache: Cache) -> None:
        """Renew a cache's lease."""
        cache.expires = self._clock() + self.lease_seconds

    async def release(self, cache: Cache, error: str = "") -> None:
        """Invalidate the capabilities at once, and free the memory when no step uses it.

        A second call only waits. A cancelled call frees the memory too.

        Args:
            cache: The cache.
            error: Name of the fault that ended the generation; empty: none did.
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
        """Release the youngest unfinished generation, unless memory was freed meanwhile.

        Its client creates its cache again when there is memory; the tokens are the same. The oldest
        is never released, so one generation always comes to its end.

        Args:
            since: When the job that found no memory began to wait for its step (perf_counter).
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
        """Free every cache whose lease expired, and renew leases of busy caches.

        Returns:
            The number of caches freed.
        """
        expired: list[Cache] = []
        for cache in self:
            if cache.busy:
                self.renew(cache)
            elif self._expired(cache):
                expired.append(cache)
        for cache in expired:
            _log.info("lease expired", extra={"epoch": cache.epoch})
            self.expired += 1
            await self.release(cache, "lease_expired")
        return len(expired)

    @property
    def unfinished(self) -> int:
        """Caches whose generation has not ended."""
        return sum(cache.sequence.finish is None for cache in self)

    def check_integrity(self) -> None:
        """Check that no memory and no descriptor leaked. No job and no release may be running.

        Raises:
            AssertionError: An invariant is broken; the message names all that are.
        """
        caches = list(self)
        segments = [each.segment for each in (*(c.sequence for c in caches), *self.prefixes)]
        files = [segment.file for segment in segments]
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
        used, reserved = self.memory.used_bytes, sum(each.reserved_bytes for each in segments)
        if used > self.memory.limit_bytes:
            broken.append(f"{used} bytes are used, limit {self.memory.limit_bytes}")
        if isinstance(self.memory, SegmentMemory) and used != reserved:
            broken.append(f"{used} bytes accounted, {reserved} reserved")
        if grants != {id(cache) for cache in caches}:
            broken.append("handles and read grants name different caches")
        if broken:
            raise AssertionError("; ".join(broken))


def _invariants(cache: Cache) -> dict[str, bool]:
    """Whether each invariant is kept, by the message for a broken one."""
    sequence, segment = cache.sequence, cache.sequence.segment
    return {
        "its segment is closed": not segment.closed,
        "it was released": not cache.released,
        "its header differs": segment.closed
        or (segment.header.epoch, segment.header.committed) == (cache.epoch, sequence.committed),
        "committed beyond what is reserved": sequence.committed <= segment.reserved,
        "reserved beyond its capacity": segment.reserved <= segment.capacity,
        "text and history differ": len(sequence.history) == len(sequence.tokens),
        "its anchor is not the newest token": sequence.prefilling
        or sequence.committed == len(sequence.tokens) - 1,
        "longer than its limit": len(sequence.tokens) <= sequence.generation.length_limit,
    }
