"""A drafting method in one file: drafts the tokens that most often followed a token.

Install it with `pip install docs/examples`, load it with
`paceline drafter --load followers=followers,branches=3`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checks import check_range
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    Resources,
    Update,
    parse_options,
    refuse_folder,
)
from paceline.tree import TokenTree, grow


@dataclass(frozen=True)
class FollowersOptions:
    """Settings, given behind the method's name: `followers,branches=3`."""

    branches: int = 4
    """Most children of a node."""

    min_survival: float = 0.1
    """Nodes less likely than this to be accepted are left out."""

    def __post_init__(self) -> None:
        check_range("branches", self.branches, 1, 16)
        check_range("min_survival", self.min_survival, 0.0, 1.0)


class FollowersSequence(DraftSequence):
    """State of one generation: how often each token followed each other token."""

    def __init__(self, text: Sequence[int], options: FollowersOptions) -> None:
        self._options = options
        self._followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._anchor = text[0]
        self._take(text[1:])

    def extend(self, update: Update) -> None:
        """Count emitted tokens."""
        self._take(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        """Return a tree of the most likely followers by these counts."""
        return grow(
            self._anchor,
            self._children,
            nodes=budget.nodes,
            depth=budget.depth,
            min_survival=self._options.min_survival,
        )

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._followers[self._anchor][token] += 1
            self._anchor = token

    def _children(self, token: int, depth: int) -> Iterator[tuple[int, float, int]]:
        """Yield token, confidence and state of each child; the state of a node is its token."""
        counts = self._followers.get(token, Counter())
        seen = counts.total() + 1  # One more, so that no token is certain.
        for follower, count in counts.most_common(self._options.branches):
            yield follower, count / seen, follower


class FollowersDrafter(Drafter):
    """A loaded version: the settings. There are no weights."""

    method = "followers"

    def __init__(self, options: FollowersOptions) -> None:
        self._options = options

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> FollowersDrafter:
        """Read the settings.

        Raises:
            LoadError: an option is wrong, or a folder was given.
        """
        refuse_folder(cls.method, folder)
        return cls(parse_options(FollowersOptions, options))

    def start(self, generation: GenerationInfo) -> FollowersSequence:
        """Count the prompt."""
        return FollowersSequence(generation.tokens, self._options)
