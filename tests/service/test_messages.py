"""Messages and frames of a peer: what they cost is bounded before they are parsed."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from paceline.service import limits
from paceline.service.exchange import FramedSocket, PeerGone
from paceline.service.messages import MessageTooLarge, count_fields, parse
from paceline.v1 import exchange_pb2, tree_pb2, verifier_pb2

Pair = tuple[FramedSocket, socket.socket]


def test_fields_are_counted_at_any_depth() -> None:
    lists = exchange_pb2.JoinRequest(drafters=exchange_pb2.DrafterList(drafters=[{}] * 1000))
    assert count_fields(type(lists).DESCRIPTOR, lists.SerializeToString()) == 1001
    trees = [exchange_pb2.DraftedTree(tree=tree_pb2.TokenTree(tokens=[1] * 9)) for _ in range(7)]
    message = exchange_pb2.JoinRequest(trees=trees, opened=[{}] * 3)
    assert count_fields(exchange_pb2.JoinRequest.DESCRIPTOR, message.SerializeToString()) == 24
    prompt = verifier_pb2.CreateCacheRequest(prompt_tokens=range(10_000), drafter="x")
    prompt.sampling.logit_bias[5] = 1.0
    assert count_fields(type(prompt).DESCRIPTOR, prompt.SerializeToString()) == 6


@pytest.mark.parametrize("field", [b"\x0a\x00", b"\x20\x01", b"\xf8\x7f\x01"])
def test_a_message_of_too_many_fields_is_not_parsed(field: bytes) -> None:
    """Such as four million drafters that are empty, or fields that nobody knows."""
    inner = field * 1_400_000
    sizes = [len(inner) >> shift & 0x7F for shift in (0, 7, 14, 21)]
    head = bytes([0x0A, *(size | 0x80 for size in sizes[:3]), sizes[3]])
    for raw in (head + inner, inner):
        with pytest.raises(MessageTooLarge, match=f"more than {limits.MESSAGE_FIELDS} fields"):
            parse(exchange_pb2.JoinRequest, raw, 1 << 30)


def test_a_message_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(MessageTooLarge, match="65 bytes, expected at most 64"):
        parse(exchange_pb2.JoinRequest, b"\xff" * 65, 64)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_are_counted_or_refused(raw: bytes, repeat: int) -> None:
    """A field takes a byte at least."""
    raw *= repeat + 1
    for kind in (exchange_pb2.JoinRequest, verifier_pb2.CreateCacheRequest):
        with suppress(DecodeError):
            assert count_fields(kind.DESCRIPTOR, raw) <= len(raw)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_what_is_parsed_was_counted(shape: list[int]) -> None:
    message = exchange_pb2.JoinRequest(
        trees=[{"tree": {"distributions": [{}] * size}} for size in shape]
    )
    assert count_fields(type(message).DESCRIPTOR, message.SerializeToString()) == sum(
        2 + size for size in shape
    )


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with far:
        framed = FramedSocket(near, 1000)
        yield framed, far
        framed.close()


def test_few_messages_are_taken_at_a_time(pair: Pair) -> None:
    framed, far = pair
    far.sendall(b"\0\0\0\0" * 500)
    taken = 0
    while taken < 500:
        messages = framed.receive(64)
        assert 0 < len(messages) <= 64
        taken += len(messages)
        assert framed.has_message == (taken < 500)
    assert framed.receive(64) == []


def test_one_read_at_a_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 10)
    framed, far = pair
    far.sendall(b"\x0c\0\0\0" + b"x" * 12 + b"\x01\0\0\0y")
    assert [framed.receive() for _ in range(4)] == [[], [b"x" * 12], [b"y"], []]


def test_a_frame_that_is_too_long_ends_the_connection(pair: Pair) -> None:
    """When its length has come, and after the messages before it."""
    framed, far = pair
    far.sendall(b"\x01\0\0\0y" + (1001).to_bytes(4, "little"))
    assert framed.receive(1) == [b"y"]
    assert framed.has_message
    with pytest.raises(PeerGone, match="1001 bytes, expected at most 1000"):
        framed.receive(1)


def test_the_last_messages_of_a_peer_are_read(pair: Pair) -> None:
    framed, far = pair
    far.sendall(b"\x01\0\0\0y" * 3)
    far.close()
    assert framed.receive(2) == [b"y"] * 2
    assert framed.receive(2) == [b"y"]
    with pytest.raises(PeerGone, match="closed"):
        framed.receive(2)
