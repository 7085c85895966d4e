"""Segments as a verifier writes them, and a verifier that passes one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.verifier.kv.base import KvLayout, SequenceKv
from paceline.verifier.kv.segment import Segment, SegmentMemory

GRANT = bytes(range(16))
GENERATION = 7
LAYERS, HEADS, DIM, CAPACITY = 3, 2, 4, 512
COMMITTED = 200


@contextmanager
def new_segment() -> Iterator[Segment]:
    """A cache with 200 committed positions of random KV."""
    memory = SegmentMemory(KvLayout(LAYERS, HEADS, DIM, torch.float32), 1 << 30)
    segment = Segment(memory, CAPACITY)
    try:
        segment.header.open(GENERATION)
        segment.reserve(COMMITTED)
        segment.kv[..., : segment.reserved, :].normal_()
        segment.publish(COMMITTED)
        yield segment
    finally:
        segment.close()


def change_layout(segment: SequenceKv, **fields: Any) -> None:
    """Set fields of the layout in a segment's header."""
    layout = segment.header.layout
    for path, value in fields.items():
        *parents, field = path.split("__")
        message: Any = layout
        for name in parents:
            message = getattr(message, name)
        if isinstance(value, list):
            message.ClearField(field)
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    segment.header.describe(layout)


class KvVerifier:
    """A verifier's side of mapping, with one cache."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.hangs = False  # it does not answer
        self.requests: list[bytes] = []

    async def share(self, read_grant: bytes) -> int | None:
        """Returns the descriptor for a read grant; None: there is no such cache."""
        self.requests.append(read_grant)
        if self.hangs:
            await asyncio.Event().wait()
        return self.segment.file if read_grant == GRANT else None


def passed(segment: SequenceKv) -> list[int]:
    """Descriptors of a cache, as a drafter gets them."""
    return [os.dup(file) for file in segment.files]
