"""Local sources: trees that the verifier guesses itself, without a drafter service.

They cost microseconds, so they need no controller: a tree is made for every step, and the scheduler
admits the nodes that are worth their time. A generation uses them if it names no drafter. Where the
default drafter of a service drafts too, its tree and the local one are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.sources.grammar import GrammarSource
from paceline.sources.ngram import NgramOptions, NgramOwners, NgramSource
from paceline.tree import TokenTree, merge
from paceline.verifier.engine.job import LOCAL, Decode, Draft
from paceline.verifier.grammar import Guide

_WARM = 512
"""Tokens of a text that enter its index in one step, which takes about half a millisecond."""


class LocalSources:
    """The sources of a verifier, and what they keep of each owner. Engine thread only."""

    def __init__(self, sources: str) -> None:
        """Make the sources that one of :data:`paceline.verifier.options.SOURCES` names."""
        self._owners = NgramOwners(NgramOptions()) if sources in ("all", "ngram") else None
        self._grammar = sources in ("all", "grammar")

    def begin(self, job: Decode) -> LocalGuesses | None:
        """The guesses for a generation from its newest token on; None: it uses none."""
        sequence = job.sequence
        text = guide = None
        if job.drafter == "" and self._owners is not None:
            owner = "" if job.isolated else sequence.user
            text = self._owners.start(sequence.tokens, owner)
        if job.drafter == "" and self._grammar:
            guide = sequence.guide
        if text is None and guide is None:
            return None
        return LocalGuesses(text, guide, sequence.generation.stop_ids)


class LocalGuesses:
    """The guesses for one generation.

    Attributes:
        methods: Methods of drafters that would guess the same.
    """

    def __init__(
        self, text: NgramSource | None, guide: Guide | None, stop_ids: Collection[int]
    ) -> None:
        self._text = text
        self.methods = frozenset[str]() if text is None else frozenset(["ngram"])
        self._grammar = None if guide is None else GrammarSource(guide, stop_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens of a step, which the grammar has taken."""
        if self._text is not None:
            self._text.extend(tokens)
        if self._grammar is not None:
            self._grammar.extend(tokens)

    def propose(self, nodes: int, depth: int) -> TokenTree:
        """A tree of at most so many nodes, none deeper than ``depth``; empty: nothing is known."""
        tree = TokenTree()
        if self._text is not None:
            self._text.warm(_WARM)
            if not self._text.backlog:
                tree = self._text.propose(nodes, depth)
        if self._grammar is not None:
            forced = self._grammar.propose(min(nodes, depth))
            tree = merge(forced, tree, nodes=nodes, depth=depth)
        return tree

    def close(self) -> None:
        """End the text."""
        if self._text is not None:
            self._text.close()


def use_guess(job: Decode) -> None:
    """Verify the local tree of a generation that has no other."""
    if job.draft is None and len(job.guess):
        job.set_draft(Draft(job.guess, LOCAL))
