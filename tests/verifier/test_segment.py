"""Segments: reserved before written, and freed at once."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from verifier_support import LAYOUT

from paceline.kv.segment import HEADER_BYTES
from paceline.verifier.kv.base import OutOfMemory, open_segments
from paceline.verifier.kv.segment import Segment


def test_memory_comes_when_reserved(segment: Segment) -> None:
    def pages() -> int:
        return os.fstat(segment.file).st_blocks * 512

    assert os.fstat(segment.file).st_size == LAYOUT.byte_size(1024) == segment.file_bytes
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


def test_growing_moves_nothing(segment: Segment) -> None:
    segment.reserve(256)
    keys, values = segment.layer(1)
    keys[:, :256] = 7.0
    values[:, :256] = 8.0
    before = segment.kv.data_ptr()
    segment.reserve(1024)
    assert segment.kv.data_ptr() == before
    assert segment.kv[1, 0, :, :256].eq(7).all()
    assert segment.kv[1, 1, :, :256].eq(8).all()
    assert segment.kv[0].eq(0).all()
    assert keys.shape == (3, 1024, 8)
    assert keys[0].is_contiguous()


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


def test_closing_frees_at_once(segment: Segment) -> None:
    view = segment.layer(0)[0]
    segment.close()
    segment.close()
    assert not open_segments()
    assert segment.closed
    view.zero_()  # a view that was left keeps its own memory: no crash
