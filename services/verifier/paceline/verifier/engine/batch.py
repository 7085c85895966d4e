"""A step: one packed forward pass over blocks of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.decoder import Decoder, ForwardResult
from paceline.device import SHAPES
from paceline.kernels import (
    MAX_TREE_NODES,
    SELECTION_CHUNK,
    Probe,
    ProbedBlock,
    QueryBlock,
    plan_trees,
    send,
)
from paceline.kv.selection import ScoreObserver
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.job import Decode, EngineJob, Prefill
from paceline.verifier.kv.base import SequenceKv

if TYPE_CHECKING:
    from paceline.cuda.graphs import GraphRunner

# Rows of a step in which prompts and rounds share, so that rounds do not wait for long.
_SHARED_STEP = 256

MIN_GRAPH_PROMPT = 64  # tokens of prompts that a step of a GPU takes beside any number of rounds


def prompt_room(rounds: int) -> int:
    """Return how many tokens of prompts a step takes beside rounds with so many rows, which wait
    for its end: at least :data:`MIN_GRAPH_PROMPT`, else no more than a CUDA graph has room for."""
    return max(MIN_GRAPH_PROMPT, _SHARED_STEP - rounds, min(rounds, SHAPES[-1] - rounds))


@dataclass(frozen=True)
class _Observed:
    """The block of a batch that one observer observes."""

    observer: ScoreObserver  # the sequence's observer
    block: int  # index of the block in the plan
    nodes: tuple[int, ...]  # observed rows, counted inside the block
    rows: tuple[int, ...]  # observed rows, counted in the batch


class BatchObserver:
    """All observers of a forward pass; a :class:`paceline.decoder.model.AttentionObserver`."""

    def __init__(self) -> None:
        self._observed: list[_Observed] = []

    def __len__(self) -> int:
        return len(self._observed)

    def add(self, observer: ScoreObserver, index: int, block: QueryBlock, first: int) -> None:
        """Add the observer of a sequence, whose step begins: of the ``block`` with this
        index in the plan, which begins at the row ``first`` of the batch."""
        nodes = observer.nodes(block)
        observer.begin(index, nodes, block.start)
        rows = tuple(first + node for node in nodes)
        self._observed.append(_Observed(observer, index, nodes, rows))

    def probes(self, layer: int) -> Sequence[Probe]:
        observers = [part.observer for part in self._observed if layer in part.observer.layers]
        return [probe for observer in observers for probe in observer.probes(layer)]

    def rows(self, layer: int) -> Sequence[int]:
        return [row for part in self._querying(layer) for row in part.rows]

    def attended(self, layer: int, q: Tensor) -> None:
        querying = self._querying(layer)
        queries = q.split([len(part.rows) for part in querying])
        for part, rows in zip(querying, queries, strict=True):
            part.observer.attended(layer, rows)

    def scratch(self, windows: Sequence[int | None]) -> tuple[tuple[int, ...], list[ProbedBlock]]:
        """Return what a captured graph has to store: layers, and blocks with scratch buffers.

        Nothing if one graph cannot serve all observers: it stores scores or weights of the same
        layers for all, of layers without a window (``windows``: of each layer, or None), and once
        for each block.
        """
        observed = {tuple(part.observer.layers) for part in self._observed}
        if len(observed) != 1 or len({part.block for part in self._observed}) < len(self._observed):
            return (), []
        (layers,) = observed
        if any(windows[layer] is not None for layer in layers):
            return (), []
        blocks = []
        for part in self._observed:
            scratch = part.observer.scratch()
            if scratch is None:
                return (), []
            weights = part.observer.weights
            blocks.append(ProbedBlock(part.block, part.nodes, scratch, weights))
        return layers, blocks

    def publish(self, q_heads: int) -> None:
        """Publish the scores of a pass of a model with so many query heads."""
        for part in self._observed:
            part.observer.publish(q_heads)

    def _querying(self, layer: int) -> list[_Observed]:
        return [
            part
            for part in self._observed
            if part.observer.wants_queries and layer in part.observer.layers
        ]


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One job's part of a batch."""

    job: EngineJob
    tree: TokenTree  # the drafted nodes that the scheduler admitted
    stop: int  # position after the entry's last one. Unit: tokens.
    # Its rows of the batch's logits: the anchor's and one per node, or the last one of a prefill;
    # none in the middle of a prefill.
    logits: slice
    rows: slice  # its rows of the batch
    # Rows of the batch's logits that give the log-probabilities of the prompt's next tokens; none
    # unless they are requested.
    scored: slice


class Batch:
    """Collects query blocks, then runs them in one forward pass."""

    def __init__(self) -> None:
        self.entries: list[BatchEntry] = []  # one per job, in order
        self.tokens: list[int] = []  # packed tokens so far
        self._blocks: list[QueryBlock] = []
        self._caches: list[SequenceKv] = []
        self._logit_rows: list[int] = []
        self._taps: set[int] = set()
        self._observer = BatchObserver()

    @classmethod
    def of(cls, entry: BatchEntry) -> Batch:
        """Return a batch of one entry of another batch."""
        batch = cls()
        if isinstance(entry.job, Decode):
            batch.add_decode(entry.job, entry.tree)
        elif isinstance(entry.job, Prefill):
            batch.add_prefill(entry.job, entry.stop)
        return batch

    def __len__(self) -> int:
        """Return the number of packed tokens."""
        return len(self.tokens)

    @property
    def jobs(self) -> list[EngineJob]:
        return [entry.job for entry in self.entries]

    @property
    def attended(self) -> int:
        """KV positions attended to, summed over the packed tokens; half of a block's own."""
        blocks = self._blocks
        return sum(block.length * (block.start + (block.length + 1) // 2) for block in blocks)

    def add_decode(self, job: Decode, tree: TokenTree) -> None:
        """Add the block of a generation: the anchor and the tree under it."""
        sequence, nodes = job.sequence, 1 + len(tree)
        first, start = len(self._logit_rows), sequence.committed
        self._logit_rows.extend(range(len(self), len(self) + nodes))
        self._add_entry(job, tree, start + nodes, slice(first, first + nodes), slice(0, 0))
        parents = None if tree.is_chain else (-1, *(parent + 1 for parent in tree.parents))
        self._add_block(start, [sequence.tokens[-1], *tree.tokens], parents)
        index, block = len(self._blocks) - 1, self._blocks[-1]
        for observer in tuple(sequence.observers):
            self._observer.add(observer, index, block, len(self.tokens) - block.length)

    def add_prefill(self, prefill: Prefill, stop: int) -> None:
        """Add a part of a prefill: the text from its committed length to ``stop``."""
        sequence = prefill.sequence
        start, ends = sequence.committed, stop == len(sequence.tokens)
        scored = 0
        if sequence.request.prompt_logprobs is not None:
            scored = max(0, min(stop, sequence.text.prompt_length - 1) - start)
        first = len(self._logit_rows)
        self._logit_rows.extend(range(len(self), len(self) + scored))
        chosen = len(self._logit_rows)
        if ends:
            self._logit_rows.append(len(self) + stop - start - 1)
        logits, prompt = slice(chosen, chosen + ends), slice(first, chosen)
        self._add_entry(prefill, EMPTY, stop, logits, prompt)
        starts = [*range(start, stop, MAX_TREE_NODES)]
        observers = sequence.prompt_observers if ends else []
        if observers and starts[-1] < stop - SELECTION_CHUNK:  # all before a few rows is scored
            starts.append(stop - SELECTION_CHUNK)
        for begin, end in pairwise([*starts, stop]):
            self._add_block(begin, sequence.tokens[begin:end], final=True)
        block = self._blocks[-1]
        if block.start:
            for observer in observers:
                index, row = len(self._blocks) - 1, len(self.tokens) - block.length
                self._observer.add(observer, index, block, row)

    def forward(
        self, decoder: Decoder, graphs: GraphRunner | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the model, or a CUDA graph of it that can run the batch, which writes the KV of all
        blocks.

        Returns:
            Logits ``[rows, V]`` on the model's device, and the outputs of all layers whose hidden
            states any sequence keeps.
        """
        taps = sorted(self._taps)
        every = len(self._logit_rows) == len(self.tokens)
        rows = torch.empty(0, dtype=torch.int64)
        if not every:
            rows = send(torch.tensor(self._logit_rows, dtype=torch.int64), decoder.device)
        if graphs is not None:
            result = self._replay(decoder, graphs, taps)
            if result is not None:
                logits = result.logits if every else result.logits[rows]
                return logits, dict(zip(taps, result.taps, strict=True))
        result = decoder.forward(
            send(torch.tensor(self.tokens), decoder.device),
            plan_trees(self._blocks, device=decoder.device),
            self._caches,
            logit_rows=None if every else rows,
            taps=taps,
            observer=self._observer if len(self._observer) else None,
        )
        self._observer.publish(decoder.config.q_heads)
        return result.logits, dict(zip(taps, result.taps, strict=True))

    def prepare_next(self, graphs: GraphRunner) -> None:
        """Fill the tables of the step that follows if this one is plain decoding and no text joins,
        ends or drafts, while the GPU computes."""
        plain = all(isinstance(e.job, Decode) and not len(e.tree) for e in self.entries)
        if plain and not len(self._observer):
            blocks = [QueryBlock(last.sequence, last.start + 1, None, 1) for last in self._blocks]
            graphs.prepare(blocks, [cache.row for cache in self._caches], sorted(self._taps))

    def _replay(
        self, decoder: Decoder, graphs: GraphRunner, taps: Sequence[int]
    ) -> ForwardResult | None:
        """Replay a CUDA graph; None if no graph can run the batch and observe its attention."""
        config = decoder.config
        layers, probed = self._observer.scratch(config.windows)
        if len(self._observer) and not probed:
            return None
        tables = [cache.row for cache in self._caches]
        result = graphs.forward(self.tokens, self._blocks, tables, taps, layers, probed)
        if result is not None:
            self._observer.publish(config.q_heads)
        return result

    def _add_entry(
        self, job: EngineJob, tree: TokenTree, stop: int, logits: slice, scored: slice
    ) -> None:
        sequence = job.sequence
        rows = slice(len(self), len(self) + stop - sequence.committed)
        self.entries.append(BatchEntry(job, tree, stop, logits, rows, scored))
        self._caches.append(sequence.kv)
        if sequence.request.taps is not None:
            self._taps.update(sequence.request.taps.layers)

    def _add_block(
        self,
        start: int,
        tokens: Sequence[int],
        parents: tuple[int, ...] | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Add a block of the newest entry."""
        self._blocks.append(QueryBlock(len(self._caches) - 1, start, parents, len(tokens), final))
        self.tokens += tokens
