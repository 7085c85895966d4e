"""One packed forward pass: the blocks of many sequences, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.decoder import Decoder, ForwardResult, GraphRunner
from paceline.decoder.graphs import table_row
from paceline.kernels import CHUNK, TreeSegment, plan_trees
from paceline.verifier.engine.job import Job, Prefill, Round
from paceline.verifier.engine.observer import BatchObserver
from paceline.verifier.engine.sequence import Sequence, States
from paceline.verifier.engine.tree import NO_TREE, DraftTree
from paceline.verifier.kv.base import SequenceKv


@dataclass(frozen=True, slots=True)
class Share:
    """What one job has in a batch.

    Attributes:
        job: The job.
        tree: The block's tree, cut to the depth that can still be emitted.
        stop: End of its blocks. Unit: tokens.
        logits: Rows of the batch's logits that belong to it: one per node, or the one behind the
            text at the end of a prefill; none in the middle of a prefill.
        rows: Rows of the batch that belong to it.
    """

    job: Job
    tree: DraftTree
    stop: int
    logits: slice
    rows: slice


class Batch:
    """Gathers blocks, then runs them in one forward pass.

    Attributes:
        shares: One per job, in order.
        tokens: Packed tokens so far.
    """

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.tokens: list[int] = []
        self._blocks: list[TreeSegment] = []
        self._caches: list[SequenceKv] = []
        self._logit_rows: list[int] = []
        self._taps: set[int] = set()
        self._observer = BatchObserver()

    @classmethod
    def of(cls, share: Share) -> Batch:
        """A batch of what one job has in another batch."""
        batch = cls()
        if isinstance(share.job, Round):
            batch.add_round(share.job, share.tree)
        elif isinstance(share.job, Prefill):
            batch.add_prefill(share.job, share.stop)
        return batch

    def __len__(self) -> int:
        """Packed tokens."""
        return len(self.tokens)

    @property
    def attended(self) -> int:
        """Positions that the packed tokens attend to, summed over them; half of a block's own."""
        blocks = self._blocks
        return sum(block.length * (block.start + (block.length + 1) // 2) for block in blocks)

    def add_round(self, round_: Round, tree: DraftTree) -> None:
        """Add the block of a round: the anchor and the tree under it."""
        sequence = round_.sequence
        first, stop = len(self._logit_rows), sequence.committed + len(tree)
        logits, rows = slice(first, first + len(tree)), self._next_rows(len(tree))
        self.shares.append(Share(round_, tree, stop, logits, rows))
        self._logit_rows.extend(range(len(self.tokens), len(self.tokens) + len(tree)))
        self._add_block(
            self._cache(sequence),
            sequence.committed,
            [sequence.tokens[-1], *tree.tokens],
            None if tree.is_chain else tuple(tree.parents),
        )
        self._observe(sequence)

    def add_prefill(self, prefill: Prefill, stop: int) -> None:
        """Add a piece of a prefill: the text from what is committed to ``stop``."""
        text, begin = prefill.sequence.tokens, prefill.sequence.committed
        first, ends = len(self._logit_rows), stop == len(text)
        logits, rows = slice(first, first + ends), self._next_rows(stop - begin)
        self.shares.append(Share(prefill, NO_TREE, stop, logits, rows))
        cache = self._cache(prefill.sequence)
        # No block may cross a chunk of the attention, or its bits would depend on the cut.
        borders = [begin, *range((begin // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
        for start, end in pairwise(borders):
            self._add_block(cache, start, text[start:end], None)
        if ends:
            self._logit_rows.append(len(self.tokens) - 1)
            self._observe(prefill.sequence)

    def forward(self, decoder: Decoder, graphs: GraphRunner | None = None) -> tuple[Tensor, States]:
        """Run it: writes the KV of all blocks.

        Args:
            decoder: The model.
            graphs: Captured passes of it, for batches that they can run.

        Returns:
            Logits ``[rows, V]`` on the model's device, and the outputs of all layers whose hidden
            states any sequence keeps.
        """
        taps = sorted(self._taps)
        if graphs is not None:
            result = self._replay(decoder, graphs, taps)
            if result is not None:
                logits = result.logits[torch.tensor(self._logit_rows, device=decoder.device)]
                return logits, dict(zip(taps, result.taps, strict=True))
        every = len(self._logit_rows) == len(self.tokens)
        rows = torch.tensor(self._logit_rows, dtype=torch.int64, device=decoder.device)
        result = decoder.forward(
            torch.tensor(self.tokens, device=decoder.device),
            plan_trees(self._blocks, device=decoder.device),
            self._caches,
            logit_rows=None if every else rows,
            taps=taps,
            observer=self._observer if len(self._observer) else None,
        )
        self._observer.publish()
        return result.logits, dict(zip(taps, result.taps, strict=True))

    def _replay(
        self, decoder: Decoder, graphs: GraphRunner, taps: Items[int]
    ) -> ForwardResult | None:
        """Run it as a captured pass; None if there is none that does all that is wanted."""
        config = decoder.config
        layers, noted = self._observer.scratch(config.windows)
        if len(self._observer) and not noted:
            return None
        tables = [table_row(cache) for cache in self._caches]
        result = graphs.forward(self.tokens, self._blocks, tables, taps, layers, noted)
        if result is not None:
            self._observer.read_scratch(config.q_heads)
            self._observer.publish()
        return result

    def _next_rows(self, count: int) -> slice:
        return slice(len(self.tokens), len(self.tokens) + count)

    def _cache(self, sequence: Sequence) -> int:
        self._caches.append(sequence.segment)
        if sequence.generation.taps is not None:
            self._taps.update(sequence.generation.taps.layers)
        return len(self._caches) - 1

    def _observe(self, sequence: Sequence) -> None:
        """Add the sequence's score observers to the last block."""
        index, block = len(self._blocks) - 1, self._blocks[-1]
        for observer in tuple(sequence.observers):
            self._observer.add(observer, index, block, len(self.tokens) - block.length)

    def _add_block(
        self, cache: int, start: int, tokens: list[int], parents: tuple[int, ...] | None
    ) -> None:
        self._blocks.append(TreeSegment(cache, start, parents, len(tokens)))
        self.tokens += tokens
