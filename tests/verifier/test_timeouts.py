"""How long a text waits for its drafter. The clock is the test's."""

from typing import Any

import pytest

from paceline.service.exchange import Waiter
from paceline.text import Text
from paceline.tree import TokenTree
from paceline.v1 import exchange_pb2
from paceline.verifier.engine import drafting
from paceline.verifier.engine.drafted import DraftedText, Link
from paceline.verifier.engine.report import NoDraft

TREE = TokenTree.chain([7, 8], [0.9, 0.9]).to_proto()


class Peer:
    """A drafter service that answers when the test says so, for one text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prompt: int = 5) -> None:
        self.now, self.version, self.sent = 100.0, "1", exchange_pb2.JoinResponse()
        monkeypatch.setattr(drafting, "perf_counter", lambda: self.now)
        self.drafting = drafting.Drafting(
            Waiter(), lambda tree, job: TokenTree.from_proto(tree), strict=True
        )
        self.link = Link(exchange_pb2.DrafterList(), self.sent.MergeFrom, lambda error: None)
        self.drafting.join(self.link)
        self.offer("1")
        self.job = DraftedText(Text([1] * prompt, limit=prompt + 100), drafter="x")

    def offer(self, version: str) -> None:
        self.version = version
        listed = exchange_pb2.DrafterList()
        listed.drafters.add(name="x", version=version, method="lm")
        self.drafting.update(self.link, listed)

    def ask(self) -> exchange_pb2.JoinResponse:
        """Ask for a tree; what the service is sent."""
        self.sent.Clear()
        self.drafting.ask(self.job, 8, self.now)
        self.drafting.flush(1)
        return self.sent

    def answer(self, **parts: Any) -> None:
        self.drafting.receive(self.link, exchange_pb2.JoinRequest(**parts))

    def open(self) -> None:
        (opened,) = self.ask().open
        answer = exchange_pb2.SequenceOpened(sequence=opened.sequence, version=self.version)
        self.answer(opened=[answer])

    def timeout(self) -> float:
        """Ask for a tree; how long it may take. Unit: seconds."""
        (self.round,) = self.ask().rounds
        return self.round.timeout_us / 1e6

    def draft(self, seconds: float) -> bool:
        """The tree that was asked for comes after so long; whether the text has waited for it."""
        self.now += seconds
        self.drafting.expire(self.now)
        waited = self.job in self.drafting.waiting
        tree = exchange_pb2.DraftedTree(
            sequence=self.round.sequence, round=self.round.round, tree=TREE
        )
        self.answer(trees=[tree])
        assert (self.job.draft is not None) is waited
        self.job.draft, self.drafting.ready = None, []
        return waited


@pytest.mark.parametrize(
    ("taken", "late", "timeout"),
    [
        ([], 0, 2.0),  # a fresh drafter: nothing tells how long it takes
        ([0.075], 0, 0.6),
        ([0.001] * 3, 0, 0.05),
        ([0.3] * 20, 0, 2.0),  # a slow link
        ([0.075, 3.0, 0.7], 1, 2.0),  # a machine that stood still
    ],
)
def test_a_tree_has_several_times_what_its_version_takes(
    taken: list[float], late: int, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(monkeypatch)
    peer.open()
    for seconds in taken:
        peer.timeout()
        assert peer.draft(seconds) is (seconds < 3.0)
    assert peer.timeout() == pytest.approx(timeout)
    assert [reason for reason, _ in peer.job.fallbacks] == ["drafter_timeout"] * late


def test_a_version_that_replaces_another_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(monkeypatch)
    peer.open()
    for _ in range(3):
        peer.timeout()
        peer.draft(0.01)
    peer.timeout()
    peer.offer("2")
    refused = exchange_pb2.SequenceRefused(sequence=peer.round.sequence, reason="DRAFTER_REPLACED")
    peer.answer(refused=[refused])
    peer.open()
    assert peer.timeout() == 2.0
    assert peer.draft(1.5)
    assert not peer.job.fallbacks


@pytest.mark.parametrize("prompt", [5, 10_000])
def test_a_long_text_may_be_read_for_longer(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tree is asked for meanwhile, and the text goes on."""
    peer = Peer(monkeypatch, prompt)
    (opened,) = peer.ask().open
    peer.now += 60.0
    assert not peer.ask().rounds
    assert peer.job.no_draft is NoDraft.NOT_READY
    if prompt == 5:
        assert [reason for reason, _ in peer.job.fallbacks] == ["drafter_hung"]
        return
    peer.answer(opened=[exchange_pb2.SequenceOpened(sequence=opened.sequence, version="1")])
    assert peer.timeout() == 2.0
    assert peer.draft(0.5)
    assert not peer.job.fallbacks
