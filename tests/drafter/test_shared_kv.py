"""A verifier's KV, mapped read-only."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from open_files import memory_files, open_files

from paceline.drafter.kv import KvGone, KvNotShared
from paceline.drafter.kv.mapped import CacheFile, SharedKv, SharedStates
from paceline.kv.segment import HEADER_BYTES
from paceline.v1 import kv_pb2
from paceline.verifier.kv.base import open_segments
from paceline.verifier.kv.segment import Segment

from .segments import CAPACITY, COMMITTED, change_layout, new_segment, passed


@pytest.fixture
def segment() -> Iterator[Segment]:
    with new_segment() as made:
        yield made


@pytest.fixture
def kv(segment: Segment) -> Iterator[SharedKv]:
    opened = open_kv(segment, 0, -1)
    yield opened
    opened.close()


def open_kv(segment: Segment, *layers: int) -> SharedKv:
    return SharedKv(CacheFile(*passed(segment)), layers)


def mapped(segment: Segment) -> list[tuple[int, int, str]]:
    """Address ranges of a segment in this process, and their rights."""
    inode = os.fstat(segment.file).st_ino
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = []
    for words in lines:
        if words[4] == str(inode):
            start, end = (int(word, 16) for word in words[0].split("-"))
            found.append((start, end, words[1]))
    return found


def test_it_copies_nothing(segment: Segment, kv: SharedKv) -> None:
    """All tensors lie in one read-only mapping, and show what the owner writes."""
    (reading,) = [found for found in mapped(segment) if "w" not in found[2]]
    assert reading[1] - reading[0] == -(-segment.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    planes = [*kv.layer(0), *kv.layer(-1)]
    assert len({plane.untyped_storage().data_ptr() for plane in planes}) == 1
    assert all(reading[0] <= plane.data_ptr() < reading[1] for plane in planes)
    segment.kv[..., COMMITTED, :] = 42.0
    segment.publish(COMMITTED + 1)
    assert kv.committed == COMMITTED + 1
    assert all(plane[:, COMMITTED].eq(42).all() for plane in planes)


def test_layers_count_from_both_ends(segment: Segment) -> None:
    kv = open_kv(segment, -3, 2, -1)
    assert kv.layers == (-3, 2, -1)
    assert torch.equal(kv.layer(-3)[0], segment.layer(0)[0])
    assert torch.equal(kv.layer(2)[1], kv.layer(-1)[1])
    with pytest.raises(KeyError):
        kv.layer(0)
    kv.close()
    for layer in (3, -4):
        with pytest.raises(KvNotShared, match=f"reads layer {layer}, but the target has 3"):
            open_kv(segment, 0, layer)


def test_a_release_is_detected(segment: Segment, kv: SharedKv) -> None:
    """The owner frees at once; what the reader holds stays readable and unchanged."""
    keys, _ = kv.layer(0)
    copy = keys[:, :COMMITTED].clone()
    kv.check()
    segment.close()
    assert not open_segments()
    with pytest.raises(KvGone, match="released"):
        kv.check()
    assert torch.equal(keys[:, :COMMITTED], copy)
    assert kv.committed == COMMITTED


def test_closing_frees_the_memory(segment: Segment) -> None:
    before = memory_files()
    kv = open_kv(segment, 0)
    keys, values = kv.layer(0)
    assert len(mapped(segment)) == 2
    kv.close()
    kv.close()
    for read in (kv.check, lambda: kv.committed):
        with pytest.raises(KvGone, match="closed"):
            read()
    with pytest.raises(KeyError):
        kv.layer(0)
    assert torch.equal(keys, segment.layer(0)[0]), "a view that was left keeps the memory"
    del keys, values
    assert len(mapped(segment)) == 1
    assert memory_files() == before


STATES = {"layers": [1], "hidden_size": 2, "slots": 512, "offset": HEADER_BYTES, "dtype": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 13}, "from byte 4096"),
        ({"layers": 1 << 31}, "from byte 4096"),
        ({"capacity": (1 << 32) - 1}, "from byte 4096"),
        ({"head_dim": (1 << 32) - 1}, "from byte 4096"),
        ({"head_dim": 0}, "from byte 4096 to 4096"),
        ({"layers": 1}, "reads layer 2"),
        ({"dtype": 5}, "type number 5"),
        ({"dtype": 99}, "type number 99"),
        ({"hidden_states__offset": 8}, "from byte 8"),
        ({"hidden_states__offset": HEADER_BYTES + 2}, "from byte 4098"),
        ({"hidden_states__offset": 1 << 40}, "from byte 1099511627776"),
        ({"hidden_states__slots": 1 << 30}, "from byte 4096"),
        ({"hidden_states__slots": 264}, "keeps 264 hidden states, expected at least 272"),
        ({"hidden_states__hidden_size": 0}, "from byte 4096"),
        ({"hidden_states__layers": [0, 2]}, r"layers \[1\], but the cache keeps those of \[0, 2\]"),
        ({"hidden_states__dtype": kv_pb2.KV_DTYPE_INT8}, "type number 4"),
    ],
)
def test_no_layout_leads_out_of_the_file(
    segment: Segment, fields: dict[str, Any], message: str
) -> None:
    """And no file stays open."""
    change_layout(segment, **{f"hidden_states__{name}": value for name, value in STATES.items()})

    def open_both() -> None:
        open_kv(segment, 0, 2).close()
        SharedStates(CacheFile(*passed(segment)), [1], 16).close()

    open_both()
    before = memory_files()
    change_layout(segment, **fields)
    with pytest.raises(KvNotShared, match=message):
        open_both()
    assert memory_files() == before


@pytest.mark.parametrize(
    ("size", "data"), [(0, b""), (4033, b""), (1 << 63, b""), (9, b"\xff" * 9)]
)
def test_a_header_without_a_layout_is_refused(segment: Segment, size: int, data: bytes) -> None:
    segment.header._words[3] = size
    segment.header._layout[: len(data)] = data
    with pytest.raises(KvNotShared, match="its layout"):
        CacheFile(*passed(segment))


def test_a_closed_cache_is_refused(segment: Segment) -> None:
    segment.header.close()
    with pytest.raises(KvNotShared, match="no longer, an open cache"):
        open_kv(segment, 0)


def test_only_a_sealed_segment_is_mapped(tmp_path: Path) -> None:
    """A verifier cannot make a drafter map what it could shorten; and no descriptor stays."""
    before = memory_files()
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 2 * HEADER_BYTES)
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, 0x10 | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for each, message in ((plain, "not sealed"), (short, "has 0 bytes"), (file, "cannot map")):
        with pytest.raises(KvNotShared, match=message):
            CacheFile(each)
    assert memory_files() == before
    assert open_files(str(tmp_path)) == 0


def test_nobody_but_the_owner_can_write(segment: Segment) -> None:
    """The kernel refuses it, with the descriptor itself and with one opened anew."""
    before = segment.kv[..., :COMMITTED, :].clone()
    again = os.open(f"/proc/self/fd/{segment.file}", os.O_RDWR)
    for file in (segment.file, again):
        with pytest.raises(PermissionError):
            mmap.mmap(file, segment.file_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(file, b"x", HEADER_BYTES)
        for size in (0, 2 * segment.file_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
    os.close(again)
    assert torch.equal(segment.kv[..., :COMMITTED, :], before)


def test_a_committed_length_is_bounded_by_the_capacity(segment: Segment, kv: SharedKv) -> None:
    committed = segment.header.committed
    segment.publish(1 << 60)
    assert kv.committed == CAPACITY
    segment.publish(committed)
