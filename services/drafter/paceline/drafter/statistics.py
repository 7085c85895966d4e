"""Accepted length and draft time of drafter versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.tree import TokenTree


@dataclass
class DraftStatistics:
    """Totals over the rounds of one or more generations."""

    rounds: int = 0
    """Trees drafted whose continuation is known."""

    accepted: int = 0
    """Accepted draft tokens."""

    draft_seconds: float = 0.0

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens emitted per round, the bonus token included; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def draft_us(self) -> int:
        """Mean draft time of a round. Unit: microseconds."""
        return round(self.draft_seconds / self.rounds * 1e6) if self.rounds else 0

    def add(self, accepted: int, draft_seconds: float) -> None:
        """Add a round."""
        self.rounds += 1
        self.accepted += accepted
        self.draft_seconds += draft_seconds


def accepted_tokens(tree: TokenTree, continuation: Sequence[int]) -> int:
    """Length of the longest path of a tree that is a prefix of the text after the anchor."""
    matched = {-1: 0}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=False)):
        depth = matched.get(parent, len(continuation))
        if depth < len(continuation) and continuation[depth] == token:
            matched[node] = depth + 1
    return max(matched.values())
