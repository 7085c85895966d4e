"""Token Recycling: proposes what the target itself found likely after the same tokens.

Each row that the target computes, of a plain step or of a drafted node that was accepted or not,
says which tokens are likely after its text. They are kept by the last one, two and three tokens,
and a tree grows best first from them (Luo et al. 2024; LongSpec, appendix E, compares with it). It
needs no training and learns from all texts of an owner.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.sources.owners import Owners
from paceline.sources.ratio import Ratio
from paceline.tree import EMPTY, TokenTree, grow

WIDTH = 8  # candidates that are kept of a row
_MAX_CONTEXT = 3  # maximum length of a context that candidates are kept for, in tokens
_BRANCHES = 4  # maximum number of children of a node
_BUCKETS = 8  # groups of probabilities that share their counts
_PRIOR_WEIGHT = 4.0
"""Weight of the target's own probability in a confidence, as a number of observations."""

_MEMORY = 0.998  # weight of older observations with each new one
Context = tuple[int, ...]  # the newest tokens of a path, at most three
Rank = Callable[[int, Sequence[int], Sequence[float]], Sequence[int]]
"""Orders the candidates for an absolute position, best first, by their token ids and
probabilities. Returns their indices."""


@dataclass(frozen=True)
class RecycleOptions:
    """Bounds of what is kept."""

    contexts: int = 1 << 15
    """Contexts that are kept of each owner, those seen last; some 250 bytes each."""

    owners: int = 8  # owners whose contexts are kept: those who generated last
    max_nodes: int = 16  # maximum number of nodes of a tree
    min_survival: float = 0.05  # nodes less likely than this to be accepted are left out


class RecycledTokens:
    """Candidates by context, and how often candidates of each kind were right."""

    def __init__(self, contexts: int) -> None:
        self._limit = contexts
        self._candidates: dict[Context, tuple[array[int], array[float]]] = {}
        self._kinds = [Ratio() for _ in range((_MAX_CONTEXT + 1) * _BRANCHES * _BUCKETS)]

    def note(self, context: Context, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Keep the likeliest tokens after a context, best first, with their probabilities. Those
        from the first one on whose probability is zero or no number are left out."""
        known = self._candidates
        if not (chances and chances[-1] > 0):
            count = next((at for at, chance in enumerate(chances) if not chance > 0), len(chances))
            tokens, chances = tokens[:count], chances[:count]
            if not count:
                return
        row = array("I", tokens), array("f", chances)  # lists take three times the memory
        for length in range(1, len(context) + 1):
            key = context[-length:]
            known.pop(key, None)
            known[key] = row
        while len(known) > self._limit:
            del known[next(iter(known))]

    def find(self, context: Context) -> tuple[int, Sequence[int], Sequence[float]]:
        """Return the longest known end of a context: length (0: none), tokens, probabilities."""
        for length in range(len(context), 0, -1):
            row = self._candidates.get(context[-length:])
            if row is not None:
                return length, *row
        return 0, (), ()

    def confidence(self, length: int, rank: int, chance: float) -> float:
        """Return the probability that a candidate is the next token."""
        return self._kinds[_kind(length, rank, chance)].value(chance, _PRIOR_WEIGHT)

    def observe(
        self, length: int, tokens: Sequence[int], chances: Sequence[float], token: int
    ) -> None:
        """Candidates, best first, were followed by ``token``."""
        for rank, candidate in enumerate(tokens[:_BRANCHES]):
            kind = self._kinds[_kind(length, rank, chances[rank])]
            kind.observe(right=candidate == token, memory=_MEMORY)


def _kind(length: int, rank: int, chance: float) -> int:
    bucket = min(_BUCKETS - 1, int(_BUCKETS * chance))
    return (length * _BRANCHES + rank) * _BUCKETS + bucket


class RecycleSource:
    """The newest tokens of one generation."""

    def __init__(
        self,
        options: RecycleOptions,
        tokens: Sequence[int],
        known: RecycledTokens,
        rank: Rank | None = None,
    ) -> None:
        """Begin with a text whose newest token is the anchor. ``rank`` orders candidates; None: by
        their probabilities."""
        self._options = options
        self._context: Context = tuple(tokens[-_MAX_CONTEXT:])
        self._length = len(tokens)
        self._known = known
        self._rank = rank

    def extend(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        candidates: Sequence[tuple[Sequence[int], Sequence[float]]],
    ) -> None:
        """Take the tokens that a step emitted, the tree that was verified, and what the target
        found likely at its rows: for the anchor and each node the likeliest tokens after it and
        their probabilities, best first."""
        known, context = self._known, self._context
        for place, token in enumerate(tokens):
            length, likely, chances = self._ranked(context, place)
            if length:
                known.observe(length, likely, chances, token)
            context = (*context, token)[-_MAX_CONTEXT:]
        contexts = [self._context]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            contexts.append((*contexts[parent + 1], token)[-_MAX_CONTEXT:])
        for node_context, (likely, chances) in zip(contexts, candidates, strict=True):
            known.note(node_context, likely, chances)
        self._context = context
        self._length += len(tokens)

    def propose(self, nodes: int, depth: int, min_survival: float = 0.0) -> TokenTree:
        """Return a tree of at most so many nodes, none deeper than ``depth`` or less likely than
        ``min_survival`` to be accepted; empty: nothing is known."""
        options = self._options
        nodes = min(nodes, options.max_nodes)
        if not self._known.find(self._context)[0]:
            return EMPTY
        return grow(
            self._context,
            self._expand,
            nodes=nodes,
            depth=depth,
            min_survival=max(min_survival, options.min_survival),
            source="recycle",
        )

    def _expand(self, context: Context, level: int) -> Iterator[tuple[int, float, Context]]:
        length, tokens, chances = self._ranked(context, level)
        total = 0.0
        for rank, token in enumerate(tokens[:_BRANCHES]):
            confidence = min(self._known.confidence(length, rank, chances[rank]), 1.0 - total)
            total += confidence
            yield token, confidence, (*context, token)[-_MAX_CONTEXT:]

    def _ranked(self, context: Context, level: int) -> tuple[int, Sequence[int], Sequence[float]]:
        """Return what is known of a context at a depth behind the anchor (0: its), best first."""
        length, tokens, chances = self._known.find(context)
        if not length or self._rank is None:
            return length, tokens, chances
        order = self._rank(self._length + level, tokens, chances)
        return length, [tokens[index] for index in order], [chances[index] for index in order]


class RecycleOwners:
    """What is kept of the owners who generated last."""

    def __init__(self, options: RecycleOptions) -> None:
        self._options = options
        self._owners = Owners(options.owners, partial(RecycledTokens, options.contexts))

    def start(self, tokens: Sequence[int], owner: str, rank: Rank | None) -> RecycleSource:
        """Begin a text of an owner. Of a text without one (""), nothing is kept."""
        return RecycleSource(self._options, tokens, self._owners.of(owner), rank)
