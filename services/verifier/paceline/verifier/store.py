"""All caches of one verifier: admission, capabilities, leases."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count

import torch

from paceline.kv.segment import SHM
from paceline.verifier.cache import Cache, digest
from paceline.verifier.engine.sequence import Generation, Sequence
from paceline.verifier.kv.base import SequenceKv
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment, own_segments
from paceline.verifier.kv.taps import TapLayout

_log = logging.getLogger(__name__)

Free = Callable[[Sequence], Awaitable[None]]
"""Frees the memory of a sequence at a moment when nothing uses it."""

MakeKv = Callable[[int, TapLayout | None], SequenceKv]
"""Makes the KV memory of a sequence, for so many slots and these hidden states."""


class StoreFull(Exception):
    """No cache of that size can be admitted.

    Attributes:
        forever: It would not fit even if all others were gone.
    """

    def __init__(self, message: str, *, forever: bool = False) -> None:
        super().__init__(message)
        self.forever = forever


class CacheNotFound(Exception):
    """The capability is unknown, expired, or someone else's."""


class CacheStore:
    """Admits, finds, keeps alive and frees caches. Belongs to the event loop.

    A lease is a promise of a shortest life: it is renewed by every use of the handle and while the
    engine works for the cache; ``sweep()`` frees what nobody used for a whole lease.

    Attributes:
        used_bytes: Memory admitted. Unit: bytes.
        expired: Caches freed by ``sweep()`` so far.
        on_release: Told of each cache that goes, and of the error it goes for, if any.
    """

    def __init__(
        self,
        layout: KvLayout,
        free: Free,
        *,
        kv_bytes: int,
        max_sequences: int,
        lease_seconds: float,
        make_kv: MakeKv | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty store.

        Args:
            layout: Shape of the model's KV.
            free: How a sequence's memory is freed; the engine's ``release``.
            kv_bytes: Most memory of all caches together, each at its largest. Unit: bytes.
            max_sequences: Most caches.
            lease_seconds: How long a cache lives without use. Unit: seconds.
            make_kv: Makes the KV memory of a sequence; None: in shared memory, see ``Segment``.
            clock: Monotonic seconds.
        """
        self.layout = layout
        self.lease_seconds = lease_seconds
        self.kv_bytes = kv_bytes
        self.max_sequences = max_sequences
        self.used_bytes = 0
        self.expired = 0
        self.on_release: Callable[[Cache, str], None] | None = None
        self._free = free
        self._make_kv = make_kv or partial(Segment, layout)
        self._clock = clock
        self._caches: dict[bytes, Cache] = {}
        self._grants: dict[bytes, Cache] = {}
        self._leaving: dict[Cache, asyncio.Task[None]] = {}
        self._generations = count(1)

    def __len__(self) -> int:
        """Number of caches that hold memory."""
        return len(self._caches) + len(self._leaving)

    def __iter__(self) -> Iterator[Cache]:
        """Caches whose handles are good."""
        return iter(list(self._caches.values()))

    def admit(self, generation: Generation, owner: str) -> Cache:
        """Make a cache that has room for a whole generation and its trees.

        Raises:
            StoreFull: There is no room for it.
            OutOfMemory: The machine cannot map it.
        """
        capacity = self.layout.capacity(generation.length_limit)
        taps = None
        if generation.taps is not None:
            taps = TapLayout.of(generation.taps, self.layout, capacity)
        needed = self.layout.byte_size(capacity) + (taps.byte_size if taps is not None else 0)
        if needed > self.kv_bytes:
            raise StoreFull(
                f"prompt and output need {needed} bytes of KV, but the verifier holds "
                f"{self.kv_bytes} in all; shorten the prompt or lower max_new_tokens",
                forever=True,
            )
        if self.used_bytes + needed > self.kv_bytes or len(self) >= self.max_sequences:
            raise StoreFull(
                f"{len(self)} of {self.max_sequences} sequences hold {self.used_bytes} of "
                f"{self.kv_bytes} bytes of KV, and this one needs {needed}; try again later"
            )
        sequence = Sequence(generation, self._make_kv(capacity, taps))
        cache = Cache(sequence, owner, next(self._generations))
        self.used_bytes += cache.byte_size
        self._caches[digest(cache.handle)] = cache
        self._grants[digest(cache.read_grant)] = cache
        self.renew(cache)
        return cache

    def find(self, handle: bytes, owner: str) -> Cache:
        """The cache of a handle; its lease is renewed.

        Raises:
            CacheNotFound: The handle is unknown, or not ``owner``'s: the two look the same.
        """
        cache = self._caches.get(digest(handle))
        if cache is None or cache.owner != owner:
            raise CacheNotFound("no cache has this handle: it was released, or its lease ran out")
        self.renew(cache)
        return cache

    def find_granted(self, read_grant: bytes) -> Cache:
        """The cache of a read grant, whoever shows it: a drafter need not be who made the cache.

        Its lease is *not* renewed: who may only read keeps nothing alive.

        Raises:
            CacheNotFound: The grant is unknown, or the lease ran out.
        """
        cache = self._grants.get(digest(read_grant))
        if cache is None or self._lapsed(cache):
            raise CacheNotFound("no cache has this read grant")
        return cache

    def lease_left(self, cache: Cache) -> float:
        """How long a cache lives on without use. Unit: seconds."""
        return self.lease_seconds if cache.busy else max(0.0, cache.expires - self._clock())

    def _lapsed(self, cache: Cache) -> bool:
        return not cache.busy and self._clock() >= cache.expires

    def renew(self, cache: Cache) -> None:
        """Start a cache's lease anew."""
        cache.expires = self._clock() + self.lease_seconds

    async def release(self, cache: Cache, error: str = "") -> None:
        """Make the capabilities unknown at once, and free the memory when no step uses it.

        Safe to call twice, and to be cancelled: the memory is freed all the same. ``error`` names
        what ended the generation, if it was a fault.
        """
        if not cache.released:
            cache.released = True
            del self._caches[digest(cache.handle)]
            del self._grants[digest(cache.read_grant)]
            if cache.job is not None:
                cache.job.stop = True
            if self.on_release is not None:
                self.on_release(cache, error)
            self._leaving[cache] = asyncio.create_task(self._reclaim(cache))
            cache.sequence.tell_listeners()
        if cache in self._leaving:
            await asyncio.shield(self._leaving[cache])

    def gives_way(self, cache: Cache) -> bool:
        """Whether a cache that finds no memory to grow is to go, and leave it to an older one.

        Otherwise caches that all need to grow would wait for one another's memory. The oldest
        generation is the one that stays, so there is always one that comes to its end.
        """
        return any(
            other.generation < cache.generation and other.sequence.finish is None for other in self
        )

    async def settled(self) -> None:
        """Wait for releases under way."""
        await asyncio.gather(*self._leaving.values())

    async def close(self) -> None:
        """Release every cache."""
        for cache in self:
            await self.release(cache)

    async def _reclaim(self, cache: Cache) -> None:
        await self._free(cache.sequence)
        self.used_bytes -= cache.byte_size
        del self._leaving[cache]

    async def sweep(self) -> int:
        """Free every cache whose lease ran out; leases of caches at work are renewed.

        Returns:
            The number of caches freed.
        """
        expired: list[Cache] = []
        for cache in self:
            if cache.busy:
                self.renew(cache)
            elif self._lapsed(cache):
                expired.append(cache)
        for cache in expired:
            _log.info("lease ran out", extra={"generation": cache.generation})
            self.expired += 1
            await self.release(cache, "lease_expired")
        return len(expired)

    @property
    def unfinished(self) -> int:
        """Caches whose generation may still go on."""
        return sum(cache.sequence.finish is None for cache in self)

    def check_integrity(self) -> None:
        """Prove that nothing leaked. Only when nothing runs: no job, no release under way.

        Raises:
            AssertionError: Some rule is broken; the message names all of them.
        """
        caches = list(self)
        segments = [cache.sequence.segment for cache in caches]
        names = [segment.name for segment in segments]
        held = sum(segment.byte_size for segment in segments)
        grants = {id(cache) for cache in self._grants.values()}
        broken = [
            f"cache {cache.generation}: {rule}"
            for cache in caches
            for rule, holds in _rules(cache).items()
            if not holds
        ]
        if self._leaving:
            broken.append(f"{len(self._leaving)} caches are still being released")
        if len(set(names)) != len(names):
            broken.append("two caches share a segment")
        if set(names) != own_segments():
            broken.append(f"segments and caches differ: {sorted(set(names) ^ own_segments())}")
        if held != self.used_bytes or held > self.kv_bytes:
            broken.append(f"{self.used_bytes} bytes accounted, {held} held, limit {self.kv_bytes}")
        if grants != {id(cache) for cache in caches}:
            broken.append("handles and read grants name different caches")
        if broken:
            raise AssertionError("; ".join(broken))


def _rules(cache: Cache) -> dict[str, bool]:
    sequence, segment = cache.sequence, cache.sequence.segment
    return {
        "its segment is closed": not segment.closed,
        "it was released": not cache.released,
        "its header tells something else": segment.closed
        or (segment.header.generation, segment.header.committed)
        == (cache.generation, sequence.committed),
        "committed beyond what is reserved": sequence.committed <= segment.reserved,
        "reserved beyond its capacity": segment.reserved <= segment.capacity,
        "text and history differ": len(sequence.history) == len(sequence.tokens),
        "its anchor is not the newest token": sequence.prefilling
        or sequence.committed == len(sequence.tokens) - 1,
        "longer than its limit": len(sequence.tokens) <= sequence.generation.length_limit,
    }


def default_kv_bytes(device: torch.device) -> int:
    """A share of the memory that is free now. Unit: bytes.

    On the CPU it is half of the lesser of RAM and /dev/shm; on a GPU four fifths of its memory,
    since activations and graphs need the rest.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 4 // 5
    shm = os.statvfs(SHM)
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    ram = int(fields["MemAvailable"].split()[0]) * 1024
    return min(ram, shm.f_bavail * shm.f_frsize) // 2
