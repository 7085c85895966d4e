"""The emitted tokens, their log-probabilities and their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.v1 import sampling_pb2, tree_pb2, verifier_pb2

from ._text import Detokenizer, TextCodec

FinishReason = Literal["stop", "length", "cancelled"]
Proposer = Literal["drafter", "verifier"]
Undrafted = Literal["no_drafter", "node_budget", "not_ready", "late", "empty", "last_token"]

UNDRAFTED: dict[int, Undrafted] = {
    verifier_pb2.NO_DRAFT_REASON_NO_DRAFTER: "no_drafter",
    verifier_pb2.NO_DRAFT_REASON_NODE_BUDGET: "node_budget",
    verifier_pb2.NO_DRAFT_REASON_NOT_READY: "not_ready",
    verifier_pb2.NO_DRAFT_REASON_LATE: "late",
    verifier_pb2.NO_DRAFT_REASON_EMPTY: "empty",
    verifier_pb2.NO_DRAFT_REASON_LAST_TOKEN: "last_token",
}
_FINISH_REASONS: dict[int, FinishReason] = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, before sampling parameters."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, likeliest first, if requested."""
    text: str = ""
    """The token by itself; a part of a character in OpenAI's form "bytes:\\xe2\\x98". Empty without
    a tokenizer."""


class VerifiedTree:
    """The drafted tree of one step and its accepted nodes. A view, converted when read."""

    __slots__ = ("_accepted", "_tree")

    def __init__(self, tree: tree_pb2.TokenTree, result: verifier_pb2.RoundResult) -> None:
        self._tree = tree
        self._accepted = result.accepted_nodes

    def __repr__(self) -> str:
        return f"<VerifiedTree of {len(self.tokens)} tokens, {len(self.accepted)} accepted>"

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
    """Tokens of one step with a tree, or of consecutive steps without one."""

    text: str
    """Text that is final. An incomplete character, and text that may begin a stop string, come
    with a later chunk."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token, if requested."""
    proposed_by: tuple[Proposer, ...]
    """Which service proposed each token."""
    round: int
    """Index in `Stats.rounds`, counted from 1; 0 is the prefill."""
    pieces: tuple[str, ...]
    """Text that became final with each token; joined they are `text`."""
    tree: VerifiedTree | None = None
    """The verified tree; None without one."""
    undrafted: Undrafted | None = None
    """Why there is no tree: no drafter was asked for; drafting does not pay at the moment; the
    drafter has not joined, is not ready or failed; its tree was late; it had nothing to propose;
    only one token is left. None with a tree, for the prefill, and for tokens received again."""


class Output:
    """Collects the output of a generation.

    A stop string ends the text before it, and the tokens with the one that completes it.
    """

    def __init__(self, codec: TextCodec | None, stops: Sequence[str]) -> None:
        self._codec = codec
        self._detokenizer = Detokenizer(codec) if codec else None
        self._stops = StopMatcher(stops)
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | Literal[""] = ""

    @property
    def text(self) -> str:
        """All final text so far."""
        return "".join(self._text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def add(self, response: verifier_pb2.Round, round_index: int) -> Chunk:
        """Adds the tokens of a response, detokenizes them and finds stop strings."""
        result = response.result
        pieces = [] if self._detokenizer is None else self._read(result.tokens)
        tokens = tuple(result.tokens[: len(pieces)] if self._detokenizer else result.tokens)
        logprobs = _logprobs(result, self._codec)[: len(tokens)]
        self.token_ids.extend(tokens)
        self.logprobs.extend(logprobs)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        elif result.finish_reason:
            self.finish_reason = _FINISH_REASONS.get(result.finish_reason, "stop")
            self._finish(pieces)
        text = "".join(pieces)
        if text:
            self._text.append(text)
        accepted = len(result.accepted_nodes)
        return Chunk(
            text,
            tokens,
            tuple(logprobs),
            tuple("drafter" if i < accepted else "verifier" for i in range(len(tokens))),
            round_index,
            tuple(pieces),
            VerifiedTree(response.tree, result) if response.tree.tokens else None,
            UNDRAFTED.get(response.no_draft),
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


class StopMatcher:
    """Returns text up to the first stop string that is complete.

    The stop string whose last character comes first ends the text; among those that end at the
    same character, the longest. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._buffer = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Adds a piece and returns the text that is final.

        The buffer keeps only text that may begin a stop string. After `matched` is set, the text
        has ended, and this returns nothing more.
        """
        if not self._stops or self.matched is not None:
            return piece if self.matched is None else ""
        text = self._buffer + piece
        found = [(start + len(s), -len(s), s) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            end, negative_length, self.matched = min(found)
            self._buffer = ""
            return text[: end + negative_length]
        keep = self._undecided(text)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The buffered text, when the generation has ended."""
        text, self._buffer = self._buffer, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


def prompt_logprobs(
    prompt: Sequence[int], created: verifier_pb2.CacheCreated, codec: TextCodec | None
) -> list[TokenLogprob]:
    """Log-probabilities of the tokens of a prompt but the first."""
    return _entries(prompt[1:], created.prompt_logprobs, created.top_prompt_logprobs, codec)


def _logprobs(result: verifier_pb2.RoundResult, codec: TextCodec | None) -> list[TokenLogprob]:
    if not result.logprobs:
        return []
    return _entries(result.tokens, result.logprobs, result.top_logprobs, codec)


def _entries(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[verifier_pb2.TopLogprobs],
    codec: TextCodec | None,
) -> list[TokenLogprob]:
    tops = [tuple(zip(top.tokens, top.logprobs, strict=True)) for top in top_logprobs]
    tops += [()] * (len(tokens) - len(tops))
    return [
        TokenLogprob(token, logprob, top, codec.token_text(token) if codec else "")
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
