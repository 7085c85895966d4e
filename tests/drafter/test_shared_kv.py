"""A verifier's KV, mapped read-only."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.drafter.errors import KvGone
from paceline.drafter.kv.mapped import SharedKv
from paceline.verifier.kv.segment import Segment, own_segments

from .segments import COMMITTED, GRANT, describe, new_segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    with new_segment() as made:
        yield made


@pytest.fixture
def kv(segment: Segment) -> Iterator[SharedKv]:
    opened = SharedKv(describe(segment), GRANT, (0, -1))
    yield opened
    opened.close()


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
    kv = SharedKv(describe(segment), GRANT, (-3, 2, -1))
    assert kv.layers == (-3, 2, -1)
    assert torch.equal(kv.layer(-3)[0], segment.layer(0)[0])
    assert torch.equal(kv.layer(2)[1], kv.layer(-1)[1])
    with pytest.raises(KeyError):
        kv.layer(0)
    kv.close()


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
    kv = SharedKv(describe(segment), GRANT, (0,))
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
from paceline.drafter.kv.mapped import SharedKv
from paceline.v1 import kv_pb2
response = kv_pb2.MapCacheResponse.FromString(bytes.fromhex(sys.argv[1]))
kv = SharedKv(response, bytes.fromhex(sys.argv[2]), (0,))
keys, _ = kv.layer(0)
print(float(keys[0, 0, 0]), flush=True)
keys[0, 0, 0] = 1.0
print("written", flush=True)
"""


def test_writing_is_impossible(segment: Segment) -> None:
    """A write ends the process, and torch's warning is suppressed."""
    before = segment.kv[..., :COMMITTED, :].clone()
    arguments = [describe(segment).SerializeToString().hex(), GRANT.hex()]
    command = [sys.executable, "-W", "error", "-c", READER, *arguments]
    child = subprocess.run(command, capture_output=True, text=True)
    assert float(child.stdout) == pytest.approx(float(before[0, 0, 0, 0, 0])), child.stderr
    assert child.returncode == -signal.SIGSEGV
    assert "not writable" not in child.stderr
    assert torch.equal(segment.kv[..., :COMMITTED, :], before)
