"""A recording's KV as a drafter would get it under a verifier's selection policy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.decoder import Decoder
from paceline.drafter import Drafter
from paceline.drafter.acceptance import RecordedKv, Recording, rounds, standing
from paceline.drafter.tree import Tree
from paceline.kernels import TreeSegment, plan_trees
from paceline.kv.policies import load_policy
from paceline.verifier.engine.observer import BatchObserver
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment

POLICIES = ("chunk_topk", "verified", "quest")
"""Those that learn from verification."""


class SelectedKv(RecordedKv):
    """Chosen positions of one layer, by the verifier's own code.

    What verification looks at decides: so each round runs the anchor and the path to the tree's
    deepest node, whose rows are those that a verifier notes, through the target. Without the rest
    of the tree, which no row of that path sees.
    """

    def __init__(
        self, target: Decoder, recording: Recording, segment: Segment, layer: int, policy: str
    ) -> None:
        """See :func:`selected`."""
        super().__init__(recording.cache)
        self._target, self._segment, self._layer = target, segment, layer
        self._recording, self._recorded = recording, recording.cache
        self._selection = load_policy(policy)(segment, [layer])
        self._chosen: list[Tensor] = []

    def refresh(self, below: int, budget: int) -> int:
        """See :class:`paceline.drafter.kv.reader.KvReader`."""
        length = min(self.committed, below)
        self._chosen = self._selection.choose(length, budget or length) if length else []
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """See :class:`paceline.drafter.kv.reader.KvReader`."""
        keys, values = self._recorded.layer(layer)
        return [(keys[:, chosen], values[:, chosen]) for chosen in self._chosen]

    def accepted_lengths(self, drafter: Drafter) -> list[int]:
        """See :func:`paceline.drafter.acceptance.accepted_lengths`."""
        found = []
        for tree, following in rounds(drafter, self._recording, kv=self):
            self._verify(tree)
            found.append(standing(tree, following))
        return found

    def _verify(self, tree: Tree) -> None:
        paths = [tree.path(node) for node in range(len(tree))]
        tokens = [self._recording.tokens[self.committed], *max(paths, key=len, default=())]
        start, count = self.committed, len(tokens)
        block, observer = TreeSegment(0, start, None, count), BatchObserver()
        assert self._selection.observer is not None, "these policies score positions"
        observer.add(self._selection.observer, 0, block, 0)
        self._target.forward(
            torch.tensor(tokens),
            plan_trees([block]),
            [self._segment],
            logit_rows=torch.tensor([0]),
            observer=observer,
        )
        observer.publish()
        for layer in range(self._segment.layout.layers):  # what stays is the recorded text
            for ours, theirs in zip(
                self._segment.layer(layer), self._recorded.layer(layer), strict=True
            ):
                stop = min(start + count, len(self._recorded))
                ours[:, start:stop] = theirs[:, start:stop]


@contextmanager
def selected(target: Decoder, recording: Recording) -> Iterator[Segment]:
    """A verifier's segment with a recording's KV in it, for :class:`SelectedKv`."""
    config, cache = target.config, recording.cache
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype)
    segment = Segment(layout, layout.capacity(len(recording.tokens)))
    try:
        segment.reserve(segment.capacity)
        for layer in range(config.layers):
            for ours, theirs in zip(segment.layer(layer), cache.layer(layer), strict=True):
                ours[:, : len(cache)] = theirs[:, : len(cache)]
        yield segment
    finally:
        segment.close()
