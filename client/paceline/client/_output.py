"""The emitted tokens, their log-probabilities and their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.v1 import sampling_pb2, tree_pb2, verifier_pb2

from ._stop import StopMatcher
from ._text import Detokenizer, TextCodec

Proposer = Literal["drafter", "verifier"]
Undrafted = Literal["no_drafter", "node_budget", "not_ready", "late", "empty", "last_token"]

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token, before sampling parameters."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, likeliest first, if requested."""


class VerifiedTree:
    """The drafted tree of one round and its accepted nodes. A view, converted when read."""

    __slots__ = ("_accepted", "_tree")

    def __init__(self, tree: tree_pb2.TokenTree, result: verifier_pb2.RoundResult) -> None:
        self._tree = tree
        self._accepted = result.accepted_nodes

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token of each node, in topological order."""
        return tuple(self._tree.tokens)

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node: an earlier node, or -1 for the anchor, the newest token."""
        return tuple(self._tree.parents)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Accepted nodes, from the root down."""
        return tuple(self._accepted)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one round, or of one response of a free run."""

    text: str
    """Text that is final. An incomplete character, and text that may begin a stop string, come
    with a later chunk."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token, if requested."""
    proposed_by: tuple[Proposer, ...]
    """Which service proposed each token."""
    round: int
    """Index of the round; 0 is the prefill."""
    pieces: tuple[str, ...]
    """Text that became final with each token; joined they are `text`."""
    tree: VerifiedTree | None = None
    """The verified tree; None in a free run."""
    undrafted: Undrafted | None = None
    """Why the round has no tree: no drafter was asked for; the verifier's node budget is 0, because
    drafting does not pay; the drafter is attaching, failed or still busy; it was late; it had
    nothing to propose; only one token is left. None with a tree and for the prefill."""


class Output:
    """Collects the output of a generation.

    `append` adds tokens at once, so that the next round can start; `publish` then detokenizes
    them. A stop string ends the text before it, and the tokens with the one that completes it.
    """

    def __init__(self, codec: TextCodec | None, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(codec) if codec else None
        self._stops = StopMatcher(stops)
        self._text: list[str] = []
        self._published = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""

    @property
    def text(self) -> str:
        """All final text so far."""
        return "".join(self._text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def append(self, result: verifier_pb2.RoundResult) -> None:
        """Appends the tokens."""
        self.token_ids.extend(result.tokens)
        if result.finish_reason:
            self.finish_reason = _REASONS.get(result.finish_reason, "unknown")

    def publish(
        self,
        result: verifier_pb2.RoundResult,
        round_index: int,
        drafted: tree_pb2.TokenTree | None = None,
        undrafted: Undrafted | None = None,
    ) -> Chunk:
        """Detokenizes tokens that were appended before, and finds stop strings."""
        pieces = [] if self._detokenizer is None else self._read(result.tokens)
        tokens = tuple(result.tokens[: len(pieces)] if self._detokenizer else result.tokens)
        logprobs = _logprobs(result)[: len(tokens)]
        self.logprobs.extend(logprobs)
        self._published += len(tokens)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
            del self.token_ids[self._published :]
        if self.finish_reason and self._stops.matched is None:
            self._finish(pieces)
        text = "".join(pieces)
        if text:
            self._text.append(text)
        accepted = len(result.accepted_nodes)
        proposers: tuple[Proposer, ...] = tuple(
            "drafter" if i < accepted else "verifier" for i in range(len(tokens))
        )
        tree = None if drafted is None else VerifiedTree(drafted, result)
        return Chunk(
            text, tokens, tuple(logprobs), proposers, round_index, tuple(pieces), tree, undrafted
        )

    def _read(self, tokens: Iterable[int]) -> list[str]:
        """Final text of each token, up to the one that completes a stop string."""
        assert self._detokenizer is not None
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self._stops.push(self._detokenizer.push(token)))
            if self._stops.matched is not None:
                break
        return pieces

    def _finish(self, pieces: list[str]) -> None:
        """Adds the buffered text to the last piece."""
        if self._detokenizer is None:
            return
        rest = self._stops.push(self._detokenizer.flush())
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        rest += self._stops.flush()
        if pieces:
            pieces[-1] += rest
        elif rest:
            pieces.append(rest)


def prompt_logprobs(
    prompt: Sequence[int], created: verifier_pb2.CacheCreated
) -> list[TokenLogprob]:
    """Log-probabilities of the tokens of a prompt but the first."""
    return _entries(prompt[1:], created.prompt_logprobs, created.top_prompt_logprobs)


def _logprobs(result: verifier_pb2.RoundResult) -> list[TokenLogprob]:
    if not result.logprobs:
        return []
    return _entries(result.tokens, result.logprobs, result.top_logprobs)


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[verifier_pb2.TopLogprobs],
) -> list[TokenLogprob]:
    tops = [tuple(zip(top.tokens, top.logprobs, strict=True)) for top in top_logprobs]
    tops += [()] * (len(tokens) - len(tops))
    return [
        TokenLogprob(token, logprob, top)
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
