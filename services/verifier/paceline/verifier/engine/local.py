"""Local sources: trees that the verifier guesses itself, without a drafter service.

They cost microseconds, so they need no controller: a tree is made for every step, and the scheduler
admits the nodes that are worth their time. Every generation uses them but one without a drafter
(``none``). Where a drafter service drafts too, its tree and the local one are merged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from paceline.kernels import SamplingRules, gumbel_noise_at
from paceline.sources.grammar import GrammarOwners, GrammarSource
from paceline.sources.ngram import NgramOptions, NgramOwners, NgramSource
from paceline.sources.ratio import worth_drafting
from paceline.sources.recycle import Rank, RecycleOptions, RecycleOwners, RecycleSource
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree, merge
from paceline.verifier.grammar import Guide

# Tokens of a text that enter its index in one step, which takes about half a millisecond.
_WARM = 512

# Of ended texts, some 5 MB of memory are kept of an owner.
_TEXTS = NgramOptions(shared_tokens=1 << 18, owners=8)

# Nodes that are proposed: twice as many as were admitted lately, within these.
_MIN_NODES, _MAX_NODES = 4, 32


class LocalSources:
    """The sources of a verifier, and what they keep of each owner. Engine thread only."""

    def __init__(self, names: Collection[str]) -> None:
        """Make some of :data:`paceline.verifier.options.SOURCES`."""
        self._texts = NgramOwners(_TEXTS) if "ngram" in names else None
        self._recycled = RecycleOwners(RecycleOptions()) if "recycle" in names else None
        self._places = GrammarOwners() if "grammar" in names else None

    def begin(self, text: Text, guide: Guide | None, owner: str) -> LocalGuesses | None:
        """Return the guesses for a text of an owner from its newest token on; None if nothing
        guesses for it. Of a text without an owner (""), nothing is kept."""
        guesses = LocalGuesses()
        if self._texts is not None:
            guesses.text = self._texts.start(text.tokens, owner)
        if self._recycled is not None:
            rank = by_noise(text.sampling)
            guesses.recycled = self._recycled.start(text.tokens, owner, rank)
        if self._places is not None and guide is not None:
            guesses.grammar, guesses.guide = self._places.start(guide, owner, text.stop_ids), guide
        sources = guesses.text, guesses.recycled, guesses.grammar
        return guesses if any(source is not None for source in sources) else None


class LocalGuesses:
    """The guesses for one generation."""

    def __init__(self) -> None:
        self.text: NgramSource | None = None
        self.recycled: RecycleSource | None = None
        self.grammar: GrammarSource | None = None
        self.guide: Guide | None = None
        self._nodes = float(_MAX_NODES)
        self._tree = EMPTY
        self._candidates: list[tuple[list[int], list[float]]] = []

    def covers(self, method: str) -> bool:
        """Return whether a drafter of this method would guess the same."""
        return method == "ngram" and self.text is not None

    def checked(self, tree: TokenTree, ids: Tensor, logs: Tensor) -> None:
        """Note what the step that runs found likely after the anchor and each node of ``tree``:
        token ids, int64 ``[1 + nodes, n]`` on the CPU, best first, and their log-probabilities."""
        self._tree = tree
        self._candidates = list(zip(ids.tolist(), logs.exp().tolist(), strict=True))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens of a step, which the grammar has taken."""
        if self.text is not None:
            self.text.learn(tokens)
        if self.recycled is not None:
            self.recycled.extend(tokens, self._tree, self._candidates)
        if self.grammar is not None and self.guide is not None:
            with self.guide.turn() as ready:
                if ready:
                    self.grammar.extend(tokens)
                else:
                    for token in tokens:
                        self.grammar.skip(token)

    def admitted(self, drafted: int, admitted: int) -> None:
        """Note how many nodes of a local tree were worth their time."""
        target = min(_MAX_NODES, max(_MIN_NODES, 2 * admitted))
        self._nodes = worth_drafting(self._nodes, drafted, admitted, target)

    def propose(self, nodes: int, depth: int, least: float) -> TokenTree:
        """Return a tree of at most so many nodes, none deeper than ``depth`` or less likely than
        ``least`` to be accepted; empty: nothing is known."""
        nodes = min(nodes, round(self._nodes))
        tree = EMPTY
        if self.text is not None:
            tree = self.text.propose(nodes, depth, _WARM, least)
        if self.recycled is not None:
            tree = merge(tree, self.recycled.propose(nodes, depth, least), nodes=nodes, depth=depth)
        if self.grammar is not None and self.guide is not None:
            with self.guide.turn() as ready:
                forced = self.grammar.propose(min(nodes, depth)) if ready else EMPTY
            tree = merge(forced, tree, nodes=nodes, depth=depth)
        return tree

    def close(self) -> None:
        if self.text is not None:
            self.text.close()


def by_noise(sampling: SamplingRules) -> Rank | None:
    """Return a function that ranks candidates by the contract's noise; None: there is none."""
    if sampling.greedy:
        return None

    def rank(position: int, tokens: Sequence[int], chances: Sequence[float]) -> list[int]:
        noise = gumbel_noise_at(sampling.seed, position, torch.tensor(tokens)).tolist()
        scores = [
            (math.log(chance) if chance > 0 else -math.inf) / sampling.temperature + gumbel
            for chance, gumbel in zip(chances, noise, strict=True)
        ]
        return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)

    return rank
