"""One KV cache of the store, with its capabilities and its lease."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from paceline.verifier.engine.job import EngineJob
from paceline.verifier.engine.sequence import Sequence

if TYPE_CHECKING:
    from paceline.verifier.metrics import RequestTimes

CAPABILITY_BYTES = 16


class Cache:
    """A sequence with its capabilities, its lease and its newest job.

    Used on the event loop. Its sequence and segment belong to the engine thread while a job of it
    runs. Only ``CacheStore.release`` frees it: first it invalidates the capabilities, then the
    engine unmaps the segment between two steps.

    Attributes:
        handle: Capability to generate (16 random bytes).
        read_grant: Capability that only lets its holder read committed KV (16 random bytes).
        sequence: The sequence.
        expected_bytes: Memory that it was expected to need when it was admitted. Unit: bytes.
        epoch: Number of the cache, different for every cache of a process. A reader that finds
            another number than before must discard what it read.
        expires: When the lease ends (the store's clock).
        job: Its newest job; None before the first.
        stream: The task that serves its Generate stream; a newer stream replaces it.
        released: Whether its capabilities are invalid.
        request: Its times, if metrics are kept.
        rounds: Rounds that were traced.
    """

    def __init__(self, sequence: Sequence, epoch: int, expected_bytes: int = 0) -> None:
        self.handle = secrets.token_bytes(CAPABILITY_BYTES)
        self.read_grant = secrets.token_bytes(CAPABILITY_BYTES)
        self.sequence = sequence
        self.expected_bytes = expected_bytes
        self.epoch = epoch
        self.expires = 0.0
        self.job: EngineJob | None = None
        self.stream: object | None = None
        self.released = False
        self.request: RequestTimes | None = None
        self.rounds = 0
        sequence.read_grant = self.read_grant
        sequence.segment.header.open(epoch)

    @property
    def owner(self) -> str:
        """The client that created it; the handle is valid for this client only."""
        return self.sequence.owner

    @property
    def claimed_bytes(self) -> int:
        """Memory that it has or is expected to need. Unit: bytes."""
        reserved = self.sequence.segment.reserved_bytes
        return reserved if self.sequence.finish is not None else max(reserved, self.expected_bytes)

    @property
    def busy(self) -> bool:
        """Whether the engine runs a job of it, or has one waiting."""
        return self.job is not None and not self.job.done


def digest(capability: bytes) -> bytes:
    """SHA-256 of a capability, its lookup key: the time of a lookup reveals nothing about it."""
    return hashlib.sha256(capability).digest()
