"""All KV caches of one verifier: admission, capabilities, leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count

from paceline.verifier.cache import Cache, digest
from paceline.verifier.engine.sequence import Generation, Sequence
from paceline.verifier.kv.base import SequenceKv
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment, own_segments
from paceline.verifier.kv.taps import TapLayout

_log = logging.getLogger(__name__)

FreeSequence = Callable[[Sequence], Awaitable[None]]
"""Frees the memory of a sequence when no step uses it."""

AllocateKv = Callable[[int, TapLayout | None], SequenceKv]
"""Allocates the KV memory of a sequence: its slots, and the layout of its hidden states."""


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

    A lease is the least lifetime of an unused cache. Every use of the handle renews it, and so does
    a running job; ``sweep()`` frees caches whose lease expired.

    Attributes:
        used_bytes: Memory admitted. Unit: bytes.
        expired: Number of caches that ``sweep()`` freed.
        on_release: Called with each released cache and the error that ended its generation, or "".
    """

    def __init__(
        self,
        layout: KvLayout,
        free: FreeSequence,
        *,
        kv_bytes: int,
        max_sequences: int,
        lease_seconds: float,
        allocate: AllocateKv | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty store.

        Args:
            layout: Shape of the model's KV.
            free: Frees a sequence's memory; the engine's ``release``.
            kv_bytes: Most memory of all caches together, each at its largest. Unit: bytes.
            max_sequences: Most caches.
            lease_seconds: Lifetime of a cache without use. Unit: seconds.
            allocate: Allocates the KV memory of a sequence; None: a ``Segment`` of shared memory.
            clock: Monotonic clock. Unit: seconds.
        """
        self.layout = layout
        self.lease_seconds = lease_seconds
        self.kv_bytes = kv_bytes
        self.max_sequences = max_sequences
        self.used_bytes = 0
        self.expired = 0
        self.on_release: Callable[[Cache, str], None] | None = None
        self._free = free
        self._allocate = allocate or partial(Segment, layout)
        self._clock = clock
        self._caches: dict[bytes, Cache] = {}
        self._grants: dict[bytes, Cache] = {}
        self._releasing: dict[Cache, asyncio.Task[None]] = {}
        self._generations = count(1)

    def __len__(self) -> int:
        """Number of caches that hold memory."""
        return len(self._caches) + len(self._releasing)

    def __iter__(self) -> Iterator[Cache]:
        """Caches whose handles are valid."""
        return iter(list(self._caches.values()))

    def admit(self, generation: Generation, owner: str) -> Cache:
        """Create a cache with memory for a whole generation and its trees.

        Raises:
            StoreFull: There is not enough memory, or there are too many caches.
            OutOfMemory: The machine cannot map it.
        """
        capacity = self.layout.capacity(generation.length_limit)
        taps = None
        if generation.taps is not None:
            taps = TapLayout.of(generation.taps, self.layout, capacity)
        needed = self.layout.byte_size(capacity) + (taps.byte_size if taps is not None else 0)
        if needed > self.kv_bytes:
            raise StoreFull(
                f"prompt and output need {needed} bytes of KV, but the verifier has "
                f"{self.kv_bytes} in total; shorten the prompt or lower max_new_tokens",
                forever=True,
            )
        if self.used_bytes + needed > self.kv_bytes or len(self) >= self.max_sequences:
            raise StoreFull(
                f"{len(self)} of {self.max_sequences} sequences use {self.used_bytes} of "
                f"{self.kv_bytes} bytes of KV, and this one needs {needed}; try again later"
            )
        sequence = Sequence(generation, self._allocate(capacity, taps))
        cache = Cache(sequence, owner, next(self._generations))
        self.used_bytes += cache.byte_size
        self._caches[digest(cache.handle)] = cache
        self._grants[digest(cache.read_grant)] = cache
        self.renew(cache)
        return cache

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

    def lease_left(self, cache: Cache) -> float:
        """Remaining lifetime of a cache without use. Unit: seconds."""
        return self.lease_seconds if cache.busy else max(0.0, cache.expires - self._clock())

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
            if self.on_release is not None:
                self.on_release(cache, error)
            self._releasing[cache] = asyncio.create_task(self._reclaim(cache))
            cache.sequence.notify_listeners()
        if cache in self._releasing:
            await asyncio.shield(self._releasing[cache])

    def preemptible(self, cache: Cache) -> bool:
        """Whether a cache that cannot grow is to be released, because an older one is unfinished.

        Caches that all need to grow would otherwise wait for each other's memory. The oldest one
        is never released, so one generation always comes to its end.
        """
        return any(
            other.generation < cache.generation and other.sequence.finish is None for other in self
        )

    async def wait_released(self) -> None:
        """Wait for running releases."""
        await asyncio.gather(*self._releasing.values())

    async def close(self) -> None:
        """Release every cache."""
        for cache in self:
            await self.release(cache)

    async def _reclaim(self, cache: Cache) -> None:
        await self._free(cache.sequence)
        self.used_bytes -= cache.byte_size
        del self._releasing[cache]

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
            _log.info("lease expired", extra={"generation": cache.generation})
            self.expired += 1
            await self.release(cache, "lease_expired")
        return len(expired)

    @property
    def unfinished(self) -> int:
        """Caches whose generation has not ended."""
        return sum(cache.sequence.finish is None for cache in self)

    def check_integrity(self) -> None:
        """Check that no memory leaked. No job and no release may be running.

        Raises:
            AssertionError: An invariant is broken; the message names all that are.
        """
        caches = list(self)
        segments = [cache.sequence.segment for cache in caches]
        names = [segment.name for segment in segments]
        mapped = sum(segment.byte_size for segment in segments)
        grants = {id(cache) for cache in self._grants.values()}
        broken = [
            f"cache {cache.generation}: {rule}"
            for cache in caches
            for rule, kept in _invariants(cache).items()
            if not kept
        ]
        if self._releasing:
            broken.append(f"{len(self._releasing)} caches are still being released")
        if len(set(names)) != len(names):
            broken.append("two caches share a segment")
        if set(names) != own_segments():
            broken.append(f"segments and caches differ: {sorted(set(names) ^ own_segments())}")
        if mapped != self.used_bytes or mapped > self.kv_bytes:
            broken.append(
                f"{self.used_bytes} bytes accounted, {mapped} mapped, limit {self.kv_bytes}"
            )
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
        or (segment.header.generation, segment.header.committed)
        == (cache.generation, sequence.committed),
        "committed beyond what is reserved": sequence.committed <= segment.reserved,
        "reserved beyond its capacity": segment.reserved <= segment.capacity,
        "text and history differ": len(sequence.history) == len(sequence.tokens),
        "its anchor is not the newest token": sequence.prefilling
        or sequence.committed == len(sequence.tokens) - 1,
        "longer than its limit": len(sequence.tokens) <= sequence.generation.length_limit,
    }
