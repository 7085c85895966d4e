"""A verifier's KV, mapped read-only: the cache of the read grant or nothing."""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafter.errors import KvGone, KvNotShared
from paceline.drafter.kv.mapped import CacheFile, SharedKv, SharedStates
from paceline.kv.segment import HEADER_BYTES
from paceline.v1 import kv_pb2
from paceline.verifier.kv.base import own_prefix
from paceline.verifier.kv.segment import Segment, own_segments

from .segments import CAPACITY, COMMITTED, GRANT, change_layout, new_segment


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
    return SharedKv(CacheFile(f"/{segment.name}", GRANT), layers)


def mapped(path: Path) -> list[tuple[int, int, str]]:
    """Address ranges of a file in this process, and their rights."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = []
    for words in lines:
        if len(words) > 5 and words[5] == str(path):
            start, end = (int(word, 16) for word in words[0].split("-"))
            found.append((start, end, words[1]))
    return found


def test_it_copies_nothing(segment: Segment, kv: SharedKv) -> None:
    """All tensors lie in one read-only mapping, and show what the owner writes."""
    (reading,) = [found for found in mapped(segment.path) if "w" not in found[2]]
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
    assert segment.name not in own_segments()
    with pytest.raises(KvGone, match="released"):
        kv.check()
    assert torch.equal(keys[:, :COMMITTED], copy)
    assert kv.committed == COMMITTED


def test_closing_frees_the_memory(segment: Segment) -> None:
    path, before = segment.path, len(os.listdir("/proc/self/fd"))
    kv = open_kv(segment, 0)
    keys, values = kv.layer(0)
    assert len(mapped(path)) == 2
    kv.close()
    kv.close()
    for read in (kv.check, lambda: kv.committed):
        with pytest.raises(KvGone, match="closed"):
            read()
    with pytest.raises(KeyError):
        kv.layer(0)
    assert torch.equal(keys, segment.layer(0)[0]), "a view that was left keeps the memory"
    del keys, values
    assert len(mapped(path)) == 1
    assert len(os.listdir("/proc/self/fd")) == before


READER = """
import sys
from paceline.drafter.kv.mapped import CacheFile, SharedKv
kv = SharedKv(CacheFile(sys.argv[1], bytes.fromhex(sys.argv[2])), (0,))
keys, _ = kv.layer(0)
print(float(keys[0, 0, 0]), flush=True)
keys[0, 0, 0] = 1.0
print("written", flush=True)
"""


def test_writing_is_impossible(segment: Segment) -> None:
    """A write ends the process, and torch's warning is suppressed."""
    before = segment.kv[..., :COMMITTED, :].clone()
    arguments = [f"/{segment.name}", GRANT.hex()]
    command = [sys.executable, "-W", "error", "-c", READER, *arguments]
    child = subprocess.run(command, capture_output=True, text=True)
    assert float(child.stdout) == pytest.approx(float(before[0, 0, 0, 0, 0])), child.stderr
    assert child.returncode == -signal.SIGSEGV
    assert "not writable" not in child.stderr
    assert torch.equal(segment.kv[..., :COMMITTED, :], before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 13}, "from byte 4096"),
        ({"layers": 1 << 31}, "from byte 4096"),
        ({"capacity": (1 << 32) - 1}, "from byte 4096"),
        ({"head_dim": (1 << 32) - 1}, "from byte 4096"),
        ({"head_dim": 0}, "from byte 4096 to 4096"),
        ({"layers": 1}, "reads layer 2"),
        ({"dtype": kv_pb2.KV_DTYPE_FLOAT8_E4M3}, "type number 5"),
        ({"dtype": 99}, "type number 99"),
    ],
)
def test_no_layout_leads_out_of_the_file(
    segment: Segment, fields: dict[str, Any], message: str
) -> None:
    """And no file stays open."""
    open_kv(segment, 0, 2).close()
    change_layout(segment, **fields)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KvNotShared, match=message):
        open_kv(segment, 0, 2)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": 8}, "from byte 8"),
        ({"offset": HEADER_BYTES + 2}, "from byte 4098"),
        ({"offset": 1 << 40}, "from byte 1099511627776"),
        ({"slots": 1 << 30}, "from byte 4096"),
        ({"slots": 264}, "keeps 264 hidden states, expected at least 272"),
        ({"hidden_size": 0}, "from byte 4096"),
        ({"layers": [0, 2]}, r"layers \[1\], but the cache keeps those of \[0, 2\]"),
        ({"dtype": kv_pb2.KV_DTYPE_INT8}, "type number 4"),
    ],
)
def test_no_layout_of_hidden_states_leads_out_of_the_file(
    segment: Segment, fields: dict[str, Any], message: str
) -> None:
    valid = {"layers": [1], "hidden_size": 2, "slots": 512, "offset": HEADER_BYTES, "dtype": 1}
    for change in ({}, fields):
        layout = {f"hidden_states__{name}": value for name, value in (valid | change).items()}
        change_layout(segment, **layout)
        file = CacheFile(f"/{segment.name}", GRANT)
        if not change:
            SharedStates(file, [1], 16).close()
            continue
        with pytest.raises(KvNotShared, match=message):
            SharedStates(file, [1], 16)
        assert file.closed


@pytest.mark.parametrize(
    ("size", "data"),
    [(0, b""), (4033, b""), (1 << 63, b""), (9, b"\xff" * 9)],
)
def test_a_header_without_a_layout_is_refused(segment: Segment, size: int, data: bytes) -> None:
    with segment.path.open("r+b") as file:
        file.seek(24)
        file.write(size.to_bytes(8, sys.byteorder))
        file.seek(64)
        file.write(data)
    with pytest.raises(KvNotShared, match="its layout"):
        CacheFile(f"/{segment.name}", GRANT)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/../../etc/passwd",
        "/paceline-1-1-0123456789abcdef/../x",
        "/paceline-1-1-0123456789abcdef\n",
        "/paceline-1-1-0123456789abcde\0",
        "//paceline-1-1-0123456789abcdef",
        "/sem.paceline-1-1-0123456789abcdef",
    ],
)
def test_no_name_leads_to_another_file(name: str) -> None:
    with pytest.raises(KvNotShared, match="name of a KV segment"):
        CacheFile(name, GRANT)


def test_the_file_must_be_that_of_the_grant(segment: Segment) -> None:
    with pytest.raises(KvNotShared, match="of this read grant"):
        CacheFile(f"/{segment.name}", bytes(16))


def test_a_closed_cache_is_refused(segment: Segment) -> None:
    segment.header.close()
    with pytest.raises(KvNotShared, match="no longer, the cache"):
        open_kv(segment, 0)
    segment.close()
    with pytest.raises(KvNotShared, match="No such file"):
        open_kv(segment, 0)


def test_a_segment_of_another_user_is_refused(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to root, who could open it."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(KvNotShared, match=f"belongs to user {user}, expected {user + 1}"):
        open_kv(segment, 0)


@pytest.fixture
def other() -> Iterator[Path]:
    """A free name among the segments."""
    path = Path("/dev/shm") / f"{own_prefix()}{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def test_links_pipes_and_other_files_are_refused(segment: Segment, other: Path) -> None:
    other.symlink_to(segment.path)
    with pytest.raises(KvNotShared, match="cannot open"):
        CacheFile(f"/{other.name}", GRANT)
    other.unlink()
    os.mkfifo(other)
    with pytest.raises(KvNotShared, match="not a regular file"):
        CacheFile(f"/{other.name}", GRANT)
    other.unlink()
    with other.open("wb") as file:
        file.truncate(segment.file_bytes)
    with pytest.raises(KvNotShared, match="not, or no longer, the cache"):
        CacheFile(f"/{other.name}", GRANT)
    with other.open("wb") as file:
        file.write(hashlib.sha256(GRANT).digest())
    with pytest.raises(KvNotShared, match="has 32 bytes"):
        CacheFile(f"/{other.name}", GRANT)


def test_a_committed_length_is_bounded_by_the_capacity(segment: Segment) -> None:
    kv = open_kv(segment, 0)
    committed = segment.header.committed
    segment.publish(1 << 60)
    assert kv.committed == CAPACITY
    segment.publish(committed)
    kv.close()
