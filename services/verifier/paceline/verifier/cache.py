"""One entry of the cache store."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from paceline.verifier.engine.job import Job, Round
from paceline.verifier.engine.sequence import Sequence

if TYPE_CHECKING:
    from paceline.verifier.metrics import Request

CAPABILITY_BYTES = 16


class Cache:
    """A sequence with its capabilities, its lease and its rounds.

    Belongs to the event loop. Its sequence and segment belong to the engine thread while a job of
    it runs. It is freed by ``CacheStore.release`` alone, which first makes its capabilities
    unknown and then has the engine unmap the segment between two steps.

    Attributes:
        handle: Capability for rounds (16 random bytes).
        read_grant: Capability that only lets its holder read committed KV (16 random bytes).
        owner: Who created it; nobody else's handle is known.
        sequence: The generation.
        byte_size: Memory admitted for it, the worst case. Unit: bytes.
        generation: Different for every cache of a process; a reader that sees another one than
            before must drop what it read.
        expires: When the lease ends (the store's clock).
        job: Its newest job with the engine, or None.
        answered: The newest round that emitted something: its answer can be asked for again.
        stream: Whoever serves it now; a newer stream takes its place.
        released: Its capabilities are gone.
        request: Its times, where metrics are kept.
    """

    def __init__(self, sequence: Sequence, owner: str, generation: int) -> None:
        self.handle = secrets.token_bytes(CAPABILITY_BYTES)
        self.read_grant = secrets.token_bytes(CAPABILITY_BYTES)
        self.owner = owner
        self.sequence = sequence
        self.byte_size = sequence.segment.byte_size
        self.generation = generation
        self.expires = 0.0
        self.job: Job | None = None
        self.stream: object | None = None
        self.released = False
        self.request: Request | None = None
        self._answered: Round | None = None
        sequence.segment.header.open(generation, digest(self.read_grant))

    @property
    def busy(self) -> bool:
        """Whether the engine works for it, or is about to."""
        return self.job is not None and not self.job.done

    @property
    def answered(self) -> Round | None:
        """The newest round that came to an answer, be it a part of a free run."""
        if isinstance(self.job, Round) and self.job.done and self.job.outputs:
            self._answered = self.job
        return self._answered


def digest(capability: bytes) -> bytes:
    """What a capability is looked up by: how long a lookup takes tells nothing about the others."""
    return hashlib.sha256(capability).digest()
