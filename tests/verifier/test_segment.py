"""Segments: reserved before written, and freed at once."""

import errno
import os
from typing import Any

import pytest
from verifier_support import LAYOUT

from paceline.kv.segment import HEADER_BYTES
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.kv.segment import Segment


def test_memory_comes_when_reserved(segment: Segment) -> None:
    def pages() -> int:
        return os.fstat(segment.file).st_blocks * 512

    size = HEADER_BYTES + 1024 * LAYOUT.token_bytes
    assert os.fstat(segment.file).st_size == segment.file_bytes == size
    assert pages() == HEADER_BYTES
    segment.reserve(1)
    assert segment.reserved == 256
    assert pages() == HEADER_BYTES + 256 * LAYOUT.token_bytes
    segment.kv[..., :256, :] = 1.0
    assert pages() == HEADER_BYTES + 256 * LAYOUT.token_bytes, (
        "writing took no memory beyond the reservation"
    )
    segment.reserve(300)
    assert segment.reserved == 512
    segment.reserve(10_000)
    assert segment.reserved == segment.capacity == 1024


def test_a_full_disk_is_an_error_and_no_signal(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.reserve(256)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match="256 more tokens"):
        segment.reserve(257)
    assert segment.reserved == 256
    monkeypatch.undo()
    segment.reserve(257)
    assert segment.reserved == 512
