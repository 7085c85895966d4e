"""A drafter maps the cache of its read grant or nothing, whatever the verifier describes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.kv import KvNotShared
from paceline.drafter.kv.shared import SharedKv
from paceline.kv.segment import HEADER_BYTES
from paceline.v1 import kv_pb2
from paceline.verifier.kv.base import own_prefix
from paceline.verifier.kv.segment import Segment

from .segments import CAPACITY, DIM, GENERATION, GRANT, HEADS, LAYERS, describe, new_segment

Response = kv_pb2.MapCacheResponse
Change = Callable[[Response], object]


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    with new_segment() as made:
        yield made


def each(field: str, value: object) -> Change:
    """Sets a field of every segment."""

    def change(response: Response) -> None:
        for described in response.segments:
            setattr(described, field, value)

    return change


def memory(field: str, value: object) -> Change:
    """Sets a field of every segment's memory."""

    def change(response: Response) -> None:
        for described in response.segments:
            setattr(described.posix, field, value)

    return change


def response(field: str, value: object) -> Change:
    """Sets a field of the response."""
    return lambda response: setattr(response, field, value)


NOT_SEGMENTS = (
    "/../../etc/passwd",
    "/paceline-1-1-0123456789abcdef/../x",
    "/paceline-1-1-0123456789abcdef\n",
    "/paceline-1-1-0123456789abcde\0",
)
ROW = DIM * 4
INVALID: dict[str, tuple[Change, str]] = {
    **{repr(name): (memory("name", name), "name of a KV segment") for name in NOT_SEGMENTS},
    "nothing": (lambda r: r.ClearField("segments"), "no segment"),
    "no slash but a path": (
        memory("name", "//paceline-1-1-0123456789abcdef"),
        "name of a KV segment",
    ),
    "another program's": (
        memory("name", "/sem.paceline-1-1-0123456789abcdef"),
        "name of a KV segment",
    ),
    "none there": (memory("name", "/paceline-1-1-0123456789abcdef"), "No such file"),
    "another type": (response("dtype", kv_pb2.KV_DTYPE_INT8), "type number 4"),
    "an unknown type": (response("dtype", 99), "type number 99"),
    "no generation": (response("generation", 0), "no generation"),
    "another generation": (response("generation", GENERATION + 1), "not, or no longer, the cache"),
    "a smaller file": (memory("byte_size", 8192), "from byte"),
    "a larger file": (memory("byte_size", 1 << 40), "expected 1099511627776"),
    "the header": (each("offset", HEADER_BYTES - ROW), "from byte 4080"),
    "beyond the end": (each("offset", 1 << 63), "from byte 9223372036854775808"),
    "huge head strides": (each("head_stride", (1 << 64) - ROW), "from byte"),
    "huge position strides": (each("position_stride", (1 << 64) - ROW), "from byte"),
    "huge strides that go unused": (
        lambda r: [each(*f)(r) for f in (("heads", 1), ("head_stride", (1 << 64) - ROW))],
        "strides",
    ),
    "overlapping rows": (each("position_stride", ROW - 4), "strides"),
    "too many heads": (each("heads", HEADS * LAYERS * 2 + 1), "from byte"),
    "too many positions": (each("capacity", (1 << 32) - 1), "from byte"),
    "too wide rows": (each("head_dim", (1 << 32) - 1), "from byte"),
    "no head": (each("heads", 0), "expected none to be 0"),
    "split elements": (each("offset", HEADER_BYTES + 2), "split elements"),
    "pages": (each("page_size", 16), "not contiguous"),
    "layers twice": (lambda r: r.segments.append(r.segments[0]), "twice"),
    "no values": (each("is_value", False), "twice"),
    "half a layer": (lambda r: r.segments.pop(), "keys without values"),
    "two shapes": (lambda r: setattr(r.segments[1], "heads", 1), "differ in memory or shape"),
    "two files": (lambda r: setattr(r.segments[1].posix, "name", "/x"), "differ in memory"),
    "CUDA memory": (
        lambda r: [s.cuda_ipc.SetInParent() for s in r.segments],
        "not contiguous POSIX",
    ),
    "a layer less": (lambda r: [r.segments.pop() for _ in "kv"], "made for another target"),
}


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID)
def test_invalid_descriptions_are_refused(segment: Segment, change: Change, message: str) -> None:
    """And no file stays open."""
    answer = describe(segment)
    SharedKv(answer, GRANT, (0, 2)).close()
    change(answer)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KvNotShared, match=message):
        SharedKv(answer, GRANT, (0, 2))
    assert len(os.listdir("/proc/self/fd")) == before


def test_layers_left_out_cannot_be_counted(segment: Segment) -> None:
    for layers in ((1, 2), (0, 2)):
        with pytest.raises(KvNotShared, match="left out layers"):
            SharedKv(describe(segment, layers), GRANT, (-1,))
    for layer in (3, -4):
        with pytest.raises(KvNotShared, match=f"reads layer {layer}"):
            SharedKv(describe(segment), GRANT, (layer,))


NUMBERS = st.one_of(
    st.integers(0, 1 << 14),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([4096 + i * CAPACITY * ROW for i in range(13)]),
)
SMALL = st.one_of(st.integers(0, CAPACITY + 2), st.integers(0, (1 << 32) - 1))


@given(
    fields=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["offset", "head_stride", "position_stride"]), NUMBERS),
            st.tuples(st.sampled_from(["heads", "head_dim", "capacity", "layer"]), SMALL),
        ),
        max_size=4,
    ),
    dtype=st.integers(0, 5),
    where=st.sampled_from([slice(0, 6), slice(0, 2), slice(0, 1)]),
)
def test_no_description_leads_out_of_the_planes(
    segment: Segment, fields: list[tuple[str, int]], dtype: int, where: slice
) -> None:
    answer = describe(segment, (0, 1, 2))
    answer.dtype = dtype  # type: ignore[assignment]
    for described in answer.segments[where]:
        for name, value in fields:
            setattr(described, name, value)
    try:
        kv = SharedKv(answer, GRANT, (0,))
    except KvNotShared:
        return
    for plane in kv.layer(0):
        base = plane.untyped_storage().data_ptr()
        last = sum((n - 1) * s for n, s in zip(plane.shape, plane.stride(), strict=True))
        start = plane.data_ptr() - base
        assert start >= HEADER_BYTES
        assert start + (last + 1) * plane.element_size() <= segment.byte_size
        assert plane.shape[1] == answer.segments[0].capacity
    kv.close()


@given(name=st.text(max_size=60))
def test_no_name_leads_out_of_the_folder(segment: Segment, name: str) -> None:
    answer = describe(segment)
    for spelled in (name, f"/{segment.name}{name}", f"/paceline-{name}"):
        if spelled == f"/{segment.name}":
            continue
        memory("name", spelled)(answer)
        with pytest.raises(KvNotShared):
            SharedKv(answer, GRANT, (0,))


def test_the_file_must_be_that_of_the_grant(segment: Segment) -> None:
    with pytest.raises(KvNotShared, match="of this read grant"):
        SharedKv(describe(segment), bytes(16), (0,))


def test_a_closed_cache_is_refused() -> None:
    with new_segment() as segment:
        answer = describe(segment)
        segment.header.close()
        with pytest.raises(KvNotShared, match="no longer, the cache"):
            SharedKv(answer, GRANT, (0,))
        segment.close()
        with pytest.raises(KvNotShared, match="No such file"):
            SharedKv(answer, GRANT, (0,))


def test_a_segment_of_another_user_is_refused(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to root, who could open it."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(KvNotShared, match=f"belongs to user {user}, expected {user + 1}"):
        SharedKv(describe(segment), GRANT, (0,))


@pytest.fixture
def other() -> Iterator[Path]:
    """A free name among the segments."""
    path = Path("/dev/shm") / f"{own_prefix()}{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def test_links_pipes_and_other_files_are_refused(segment: Segment, other: Path) -> None:
    answer = describe(segment)
    memory("name", f"/{other.name}")(answer)
    other.symlink_to(segment.path)
    with pytest.raises(KvNotShared, match="cannot open"):
        SharedKv(answer, GRANT, (0,))
    other.unlink()
    os.mkfifo(other)
    with pytest.raises(KvNotShared, match="not a regular file"):
        SharedKv(answer, GRANT, (0,))
    other.unlink()
    with other.open("wb") as file:
        file.truncate(segment.byte_size)
    with pytest.raises(KvNotShared, match="not, or no longer, the cache"):
        SharedKv(answer, GRANT, (0,))
    with other.open("wb") as file:
        file.write(hashlib.sha256(GRANT).digest())
    with pytest.raises(KvNotShared, match="has 32 bytes"):
        SharedKv(answer, GRANT, (0,))


def test_a_committed_length_is_bounded_by_the_capacity(segment: Segment) -> None:
    kv = SharedKv(describe(segment), GRANT, (0,))
    committed = segment.header.committed
    segment.publish(1 << 60)
    assert kv.committed == CAPACITY
    segment.publish(committed)
    kv.close()
