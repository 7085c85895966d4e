"""A drafter maps the cache of its read grant or nothing, whatever the verifier describes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.errors import KvNotShared
from paceline.drafter.kv.mapped import SharedKv
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


def change(path: str, value: object) -> Change:
    """Sets a field of the response, by its path."""
    *parents, field = path.split(".")

    def apply(response: Response) -> None:
        message: Any = response
        for name in parents:
            message = message[int(name)] if name.isdigit() else getattr(message, name)
        setattr(message, field, value)

    return apply


NOT_SEGMENTS = (
    "/../../etc/passwd",
    "/paceline-1-1-0123456789abcdef/../x",
    "/paceline-1-1-0123456789abcdef\n",
    "/paceline-1-1-0123456789abcde\0",
    "//paceline-1-1-0123456789abcdef",
    "/sem.paceline-1-1-0123456789abcdef",
)
ROW = DIM * 4
OFFSET = "kv.layers.0.key_offset"
INVALID: dict[str, tuple[Change, str]] = {
    **{repr(name): (change("file.name", name), "name of a KV segment") for name in NOT_SEGMENTS},
    "nothing": (lambda r: r.kv.ClearField("layers"), "no layer"),
    "none there": (change("file.name", "/paceline-1-1-0123456789abcdef"), "No such file"),
    "another type": (change("dtype", kv_pb2.KV_DTYPE_INT8), "type number 4"),
    "an unknown type": (change("dtype", 99), "type number 99"),
    "no generation": (change("generation", 0), "no generation"),
    "another generation": (change("generation", GENERATION + 1), "not, or no longer, the cache"),
    "a smaller file": (change("file.byte_size", 8192), "expected 8192"),
    "a larger file": (change("file.byte_size", 1 << 40), "expected 1099511627776"),
    "the header": (change(OFFSET, HEADER_BYTES - ROW), "from byte 4080"),
    "beyond the end": (change(OFFSET, 1 << 63), "from byte 9223372036854775808"),
    "values beyond the end": (change("kv.layers.2.value_offset", 1 << 62), "from byte"),
    "huge head strides": (change("kv.head_stride", (1 << 64) - ROW), "from byte"),
    "huge position strides": (change("kv.position_stride", (1 << 64) - ROW), "from byte"),
    "huge strides that go unused": (
        lambda r: [change("kv.heads", 1)(r), change("kv.head_stride", (1 << 64) - ROW)(r)],
        "strides",
    ),
    "overlapping rows": (change("kv.position_stride", ROW - 4), "strides"),
    "too many heads": (change("kv.heads", HEADS * LAYERS * 2 + 1), "from byte"),
    "too many positions": (change("kv.capacity", (1 << 32) - 1), "from byte"),
    "too wide rows": (change("kv.head_dim", (1 << 32) - 1), "from byte"),
    "no head": (change("kv.heads", 0), "expected none to be 0"),
    "split elements": (change(OFFSET, HEADER_BYTES + 2), "split elements"),
    "pages": (change("kv.pages.page_size", 16), "in pages on a GPU"),
    "layers twice": (lambda r: r.kv.layers.append(r.kv.layers[0]), "twice"),
    "a layer less": (lambda r: r.kv.layers.pop(), "made for another target"),
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
            st.tuples(
                st.sampled_from(
                    [OFFSET, "kv.layers.0.value_offset", "kv.head_stride", "kv.position_stride"]
                ),
                NUMBERS,
            ),
            st.tuples(
                st.sampled_from(["kv.heads", "kv.head_dim", "kv.capacity", "kv.layers.1.layer"]),
                SMALL,
            ),
        ),
        max_size=4,
    ),
    dtype=st.integers(0, 5),
)
def test_no_description_leads_out_of_the_planes(
    segment: Segment, fields: list[tuple[str, int]], dtype: int
) -> None:
    answer = describe(segment)
    answer.dtype = dtype  # type: ignore[assignment]
    for path, value in fields:
        change(path, value)(answer)
    try:
        kv = SharedKv(answer, GRANT, (0,))
    except KvNotShared:
        return
    for plane in kv.layer(0):
        base = plane.untyped_storage().data_ptr()
        last = sum((n - 1) * s for n, s in zip(plane.shape, plane.stride(), strict=True))
        start = plane.data_ptr() - base
        assert start >= HEADER_BYTES
        assert start + (last + 1) * plane.element_size() <= segment.file_bytes
        assert plane.shape[1] == answer.kv.capacity
    kv.close()


@given(name=st.text(max_size=60))
def test_no_name_leads_out_of_the_folder(segment: Segment, name: str) -> None:
    answer = describe(segment)
    for spelled in (name, f"/{segment.name}{name}", f"/paceline-{name}"):
        if spelled == f"/{segment.name}":
            continue
        change("file.name", spelled)(answer)
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
    change("file.name", f"/{other.name}")(answer)
    other.symlink_to(segment.path)
    with pytest.raises(KvNotShared, match="cannot open"):
        SharedKv(answer, GRANT, (0,))
    other.unlink()
    os.mkfifo(other)
    with pytest.raises(KvNotShared, match="not a regular file"):
        SharedKv(answer, GRANT, (0,))
    other.unlink()
    with other.open("wb") as file:
        file.truncate(segment.file_bytes)
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
