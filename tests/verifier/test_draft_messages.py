"""What is collected for a drafter service before it is sent."""

from __future__ import annotations

from paceline.v1 import exchange_pb2
from paceline.verifier.engine.drafting import Link


def link() -> Link:
    return Link(exchange_pb2.DrafterList(), lambda message: None, lambda error: None)


def test_what_was_not_sent_open_is_not_sent_closed() -> None:
    """A service that reads the close first would not know the sequence."""
    found = link()
    for number in (1, 2, 3):
        found.message.open.add(sequence=number)
        found.message.rounds.add(sequence=number)
    found.close(2)
    assert [each.sequence for each in found.message.open] == [1, 3]
    assert [each.sequence for each in found.message.rounds] == [1, 3]
    assert not found.message.closed


def test_a_sequence_that_was_sent_is_closed_and_asked_nothing_more() -> None:
    found = link()
    found.message.rounds.add(sequence=1)
    found.message.rounds.add(sequence=2)
    found.close(1)
    assert [each.sequence for each in found.message.rounds] == [2]
    assert list(found.message.closed) == [1]
