"""Whatever a verifier says: the drafter maps the cache it has the grant of, or nothing."""

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


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    with new_segment() as made:
        yield made


def each(**fields: object) -> Callable[[Response], None]:
    """Set fields of every segment."""

    def lie(response: Response) -> None:
        for described in response.segments:
            for name, value in fields.items():
                setattr(described, name, value)

    return lie


def named(name: str) -> Callable[[Response], None]:
    def lie(response: Response) -> None:
        for described in response.segments:
            described.posix.name = name

    return lie


def answered(**fields: object) -> Callable[[Response], None]:
    def lie(response: Response) -> None:
        for name, value in fields.items():
            setattr(response, name, value)

    return lie


def sized(size: int) -> Callable[[Response], None]:
    def lie(response: Response) -> None:
        for described in response.segments:
            described.posix.byte_size = size

    return lie


ROW = DIM * 4
LIES: dict[str, tuple[Callable[[Response], None], str]] = {
    "nothing": (lambda r: r.ClearField("segments"), "no segment"),
    "a path": (named("/../../etc/passwd"), "name of a KV segment"),
    "a path below": (named("/paceline-1-1-0123456789abcdef/../x"), "name of a KV segment"),
    "no slash but a path": (named("//paceline-1-1-0123456789abcdef"), "name of a KV segment"),
    "a trailing line": (named("/paceline-1-1-0123456789abcdef\n"), "name of a KV segment"),
    "a zero byte": (named("/paceline-1-1-0123456789abcde\0"), "name of a KV segment"),
    "another program's": (named("/sem.paceline-1-1-0123456789abcdef"), "name of a KV segment"),
    "none there": (named("/paceline-1-1-0123456789abcdef"), "No such file"),
    "another type": (answered(dtype=kv_pb2.KV_DTYPE_INT8), "type number 4"),
    "an unknown type": (answered(dtype=99), "type number 99"),
    "no generation": (answered(generation=0), "no generation"),
    "another generation": (answered(generation=GENERATION + 1), "not, or no longer, the cache"),
    "a smaller file": (sized(8192), "from byte"),
    "a larger file": (sized(1 << 40), "expected 1099511627776"),
    "the header": (each(offset=HEADER_BYTES - ROW), "from byte 4080"),
    "beyond the end": (each(offset=1 << 63), "from byte 9223372036854775808"),
    "huge head strides": (each(head_stride=(1 << 64) - ROW), "from byte"),
    "huge position strides": (each(position_stride=(1 << 64) - ROW), "from byte"),
    "huge strides that go unused": (each(heads=1, head_stride=(1 << 64) - ROW), "strides"),
    "overlapping rows": (each(position_stride=ROW - 4), "strides"),
    "too many heads": (each(heads=HEADS * LAYERS * 2 + 1), "from byte"),
    "too many positions": (each(capacity=(1 << 32) - 1), "from byte"),
    "too wide rows": (each(head_dim=(1 << 32) - 1), "from byte"),
    "no head": (each(heads=0), "expected none to be 0"),
    "split elements": (each(offset=HEADER_BYTES + 2), "split elements"),
    "pages": (each(page_size=16), "not contiguous"),
    "layers twice": (lambda r: r.segments.append(r.segments[0]), "twice"),
    "no values": (each(is_value=False), "twice"),
    "half a layer": (lambda r: r.segments.pop(), "keys without values"),
    "two shapes": (lambda r: setattr(r.segments[1], "heads", 1), "differ in memory or shape"),
    "two files": (lambda r: setattr(r.segments[1].posix, "name", "/x"), "differ in memory"),
    "CUDA memory": (
        lambda r: [s.cuda_ipc.SetInParent() for s in r.segments],
        "not contiguous POSIX",
    ),
    "a layer less": (lambda r: [r.segments.pop() for _ in "kv"], "made for another target"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(segment: Segment, lie: str) -> None:
    tell, says = LIES[lie]
    response = describe(segment)
    SharedKv(response, GRANT, (0, 2)).close()
    tell(response)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KvNotShared, match=says):
        SharedKv(response, GRANT, (0, 2))
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
    response = describe(segment, (0, 1, 2))
    response.dtype = dtype  # type: ignore[assignment]
    for described in response.segments[where]:
        for name, value in fields:
            setattr(described, name, value)
    try:
        kv = SharedKv(response, GRANT, (0,))
    except KvNotShared:
        return
    for plane in kv.layer(0):
        base = plane.untyped_storage().data_ptr()
        last = sum((n - 1) * s for n, s in zip(plane.shape, plane.stride(), strict=True))
        start = plane.data_ptr() - base
        assert start >= HEADER_BYTES
        assert start + (last + 1) * plane.element_size() <= segment.byte_size
        assert plane.shape[1] == response.segments[0].capacity
    kv.close()


@given(name=st.text(max_size=60))
def test_no_name_leads_out_of_the_folder(segment: Segment, name: str) -> None:
    response = describe(segment)
    for spelled in (name, f"/{segment.name}{name}", f"/paceline-{name}"):
        if spelled == f"/{segment.name}":
            continue
        named(spelled)(response)
        with pytest.raises(KvNotShared):
            SharedKv(response, GRANT, (0,))


def test_the_file_itself_must_be_the_grants(segment: Segment) -> None:
    with pytest.raises(KvNotShared, match="of this read grant"):
        SharedKv(describe(segment), bytes(16), (0,))


def test_a_cache_closed_meanwhile_is_refused() -> None:
    with new_segment() as segment:
        response = describe(segment)
        segment.header.close()
        with pytest.raises(KvNotShared, match="no longer, the cache"):
            SharedKv(response, GRANT, (0,))
        segment.close()
        with pytest.raises(KvNotShared, match="No such file"):
            SharedKv(response, GRANT, (0,))


def test_a_segment_of_somebody_else_is_refused(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to root, who could open it."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(KvNotShared, match=f"belongs to user {user}, expected {user + 1}"):
        SharedKv(describe(segment), GRANT, (0,))


@pytest.fixture
def planted() -> Iterator[Path]:
    """A free name among the segments."""
    path = Path("/dev/shm") / f"{own_prefix()}{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def test_links_pipes_and_strange_files_are_refused(segment: Segment, planted: Path) -> None:
    response = describe(segment)
    named(f"/{planted.name}")(response)
    planted.symlink_to(segment.path)
    with pytest.raises(KvNotShared, match="cannot open"):
        SharedKv(response, GRANT, (0,))
    planted.unlink()
    os.mkfifo(planted)
    with pytest.raises(KvNotShared, match="not a regular file"):
        SharedKv(response, GRANT, (0,))
    planted.unlink()
    with planted.open("wb") as file:
        file.truncate(segment.byte_size)
    with pytest.raises(KvNotShared, match="not, or no longer, the cache"):
        SharedKv(response, GRANT, (0,))
    with planted.open("wb") as file:
        file.write(hashlib.sha256(GRANT).digest())
    with pytest.raises(KvNotShared, match="has 32 bytes"):
        SharedKv(response, GRANT, (0,))


def test_a_committed_length_is_bounded_by_the_capacity(segment: Segment) -> None:
    kv = SharedKv(describe(segment), GRANT, (0,))
    committed = segment.header.committed
    segment.publish(1 << 60)
    assert kv.committed == CAPACITY
    segment.publish(committed)
    kv.close()
