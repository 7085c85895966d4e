"""Segments of shared memory: reserved before written, mapped by who holds a read grant, freed."""

import asyncio
import errno
import math
import os
import struct
from typing import Any

import pytest
import torch
from calls import until
from test_store import new_store
from verifier_support import LAYOUT, Client, Clock

from paceline.kv.segment import HEADER_BYTES
from paceline.service.exchange import request_files
from paceline.text import Text
from paceline.v1 import kv_pb2
from paceline.verifier.engine.job import Request
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.kv.segment import Segment
from paceline.verifier.store import CacheNotFound

PROMPT = [3, 1, 4, 1, 5]


async def map_cache(client: Client, read_grant: bytes) -> bytes | None:
    """The content of the segment that a read grant gives; None: it gives none."""
    files = await asyncio.to_thread(request_files, client.socket_path, read_grant, 60.0)
    if not files:
        return None
    (file,) = files
    with os.fdopen(file, "rb") as opened:
        return os.pread(opened.fileno(), os.fstat(file).st_size, 0)


def epoch(file: bytes) -> int:
    (found,) = struct.unpack_from("=Q", file, 8)
    assert isinstance(found, int)
    return found


async def test_the_header_leads_to_every_element(client: Client) -> None:
    """It has the layout, the committed length and the generation."""
    created = await client.create(PROMPT)
    (cache,) = client.service.store
    file = await map_cache(client, created.read_grant)
    assert file is not None
    assert file[:8] == struct.pack("=Q", int.from_bytes(b"PACEKV\0\3", "big"))
    assert struct.unpack_from("=2Q", file, 8) == (created.epoch, len(PROMPT))
    (size,) = struct.unpack_from("=Q", file, 24)
    layout = kv_pb2.SegmentLayout.FromString(file[32 : 32 + size])
    assert layout.dtype == kv_pb2.KV_DTYPE_FLOAT32
    assert not layout.HasField("pages")
    shape = (layout.layers, 2, layout.heads, layout.capacity, layout.head_dim)
    numbers = torch.frombuffer(bytearray(file[4096:]), dtype=torch.float32)
    stored = numbers[: math.prod(shape)].view(shape)
    for layer in range(LAYOUT.layers):
        for kind, theirs in enumerate(cache.sequence.kv.layer(layer)):
            assert stored[layer, kind].shape == theirs.shape
            ours = stored[layer, kind, :, : len(PROMPT)]
            assert torch.equal(ours, theirs[:, : len(PROMPT)])
    await client.release(created.handle)


async def test_refusals(client: Client) -> None:
    """And no descriptor stays open."""
    created, other = await client.create(PROMPT), await client.create(PROMPT)
    file = await map_cache(client, other.read_grant)
    assert file is not None
    assert epoch(file) == other.epoch
    await client.release(other.handle)
    before = len(os.listdir("/proc/self/fd"))
    for grant in (created.handle, other.read_grant, bytes(16)):
        assert await map_cache(client, grant) is None
    for _ in range(8):
        assert await map_cache(client, created.read_grant) is not None
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)
    await client.release(created.handle)


async def test_an_expired_lease_ends_access_before_the_sweep() -> None:
    clock = Clock()
    store = new_store(clock)
    cache = await store.admit(Request(Text((1,), limit=9)), "me")
    clock.now = 6.0
    assert store.find_granted(cache.read_grant) is cache
    clock.now = 10.0
    with pytest.raises(CacheNotFound):
        store.find_granted(cache.read_grant)
    assert await store.sweep() == 1
    store.check_integrity()


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
