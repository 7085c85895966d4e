"""The texts of vLLM's batch: a proposer is given rows of tokens, and no names of requests."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.sources.ngram import NgramOptions, NgramSource, Owner
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.drafted import DraftedText

# A text that no batch has had for so long has ended. One that vLLM preempts comes back.
ABSENT_SECONDS = 2.0

# Tokens of a prompt that are indexed for look-up in one step, which takes 2 to 3 ms.
_WARM_TOKENS = 2048


# Chains that hold for a few tokens; matches of one token seldom do, and cost time in each step.
_OPTIONS = NgramOptions(
    max_n=4, min_n=2, continuations=2, min_survival=0.2, depth=16, shared_tokens=0
)


class VllmText(DraftedText):
    """One request of vLLM; greedy to drafters, for vLLM names no parameters."""

    def __init__(self, text: Text, row: int, owner: Owner | None) -> None:
        """Begin in a row of the batch; with an ``owner`` it is looked up."""
        super().__init__(text, drafter="")
        self.lookup = None if owner is None else NgramSource(_OPTIONS, text.tokens, owner)
        self.row = row  # in the newest batch
        self.seen_at = perf_counter()  # when a batch had it last
        self.looked_up = EMPTY  # the chain that was looked up for the next step
        self.asked_service = False  # whether a service was asked for the next step
        self.rest = 0  # steps of its newest rest, in which no service is asked
        self.rests_until = 0  # the step that ends it
        self.span: Any = None  # None if it is not traced

    def __len__(self) -> int:
        return len(self.text)

    def continues(self, tokens: NDArray[Any], new: int) -> bool:
        """Return whether a row is this text with ``new`` tokens more."""
        known = self.text.tokens
        return len(known) == len(tokens) - new and np.array_equal(tokens[: len(known)], known)

    def extend(self, row: int, tokens: NDArray[Any], new: int) -> list[int]:
        """Take over the last ``new`` tokens of its row, and return them."""
        added: list[int] = tokens[len(tokens) - new :].tolist()
        self.row, self.seen_at = row, perf_counter()
        self.text.tokens.extend(added)
        if self.lookup is not None:
            self.lookup.learn(added)
        return added

    def look_up(self, nodes: int) -> TokenTree:
        """Return the likeliest continuation of an earlier match, at most ``nodes`` tokens."""
        if self.lookup is None:
            return EMPTY
        return self.lookup.propose(nodes, nodes, _WARM_TOKENS).best_chain()


class RunningTexts:
    """The texts that run, by their tokens."""

    def __init__(self, limit: int, *, lookup: bool) -> None:
        """Begin without texts, of at most ``limit`` tokens each; ``lookup``: they are looked up."""
        self._limit = limit
        # It keeps how often matches continued, and no text.
        self._owner = Owner(_OPTIONS) if lookup else None
        self._texts: list[VllmText] = []

    def follow(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[Any], rows: NDArray[Any]
    ) -> tuple[dict[VllmText, list[int]], bool]:
        """Find the text of each row that was given tokens.

        A row is a text whose tokens it begins with. Two texts with the same tokens are the same to
        every drafter, so which of both a row is does not matter.

        Args:
            sampled: New tokens of each row; none: a part of a prompt.
            lengths: Tokens of each row, the new ones included, int ``[R]``.
            rows: Tokens of the rows, int ``[R, L]``.

        Returns the texts in the order of rows, with their new tokens, and whether there was nothing
        else in the batch: no prompt, and no text that was not known.
        """
        last = {text.row: text for text in sorted(self._texts, key=lambda text: text.seen_at)}
        left = list(self._texts)
        by_row: dict[int, VllmText] = {}
        for row, new in enumerate(sampled):
            text = last.get(row)
            if new and text is not None and text.continues(rows[row, : lengths[row]], len(new)):
                by_row[row] = text
                left.remove(text)
        known = all(map(len, sampled))
        for row, new in enumerate(sampled):
            if row in by_row or not new:
                continue
            tokens = rows[row, : lengths[row]]
            text = next((text for text in left if text.continues(tokens, len(new))), None)
            if text is not None:
                by_row[row] = text
                left.remove(text)
        texts: dict[VllmText, list[int]] = {}
        for row, new in enumerate(sampled):
            tokens = rows[row, : lengths[row]]
            if row in by_row:
                texts[by_row[row]] = by_row[row].extend(row, tokens, len(new))
            elif new:
                known = False
                ids: list[int] = tokens.tolist()
                begun = Text(ids[: -len(new)], ids[-len(new) :], limit=self._limit)
                text = VllmText(begun, row, self._owner)
                self._texts.append(text)
                texts[text] = list(new)
        return texts, known

    def take_ended(self, now: float) -> list[VllmText]:
        """Remove the texts that have ended."""
        ended = [text for text in self._texts if now - text.seen_at > ABSENT_SECONDS]
        self._texts = [text for text in self._texts if now - text.seen_at <= ABSENT_SECONDS]
        return ended
