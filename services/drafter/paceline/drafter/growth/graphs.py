"""Drafts captured as CUDA graphs, each with all its passes, levels and choices.

A graph has a fixed number of sequences and of new tokens of their texts; what a batch lacks is
padding. All that the host decides lies in tables that one copy fills before a replay: also where
the target's KV and hidden states lie in pages, which the graph gathers itself. One copy has the
results. So a draft is a copy to the GPU, a replay, a copy back and one wait, for any number of
texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.cuda.graphs import Capturing
from paceline.cuda.triton.backend import sampling_record
from paceline.cuda.triton.candidates import best_of_rows
from paceline.cuda.triton.gather import NO_PLACE, RECORD, gather_kv, gather_states
from paceline.cuda.triton.plan import PassTables, Places, Shape, Staging, TableShape
from paceline.cuda.triton.tiles import Tiling, tilings_for
from paceline.device import device_of
from paceline.drafter.growth.levels import (
    HostDraft,
    HostPass,
    LevelGrowth,
    LevelModel,
    LevelTrees,
    Passes,
    PassShape,
    TreeShape,
)
from paceline.drafter.growth.ranking import Ranker
from paceline.drafter.growth.sequence import TreeSettings
from paceline.drafter.growth.target_data import KvLayers, StateRows, TargetKv
from paceline.drafter.kv.reader import KvPages, StateSlice
from paceline.kernels import (
    Context,
    EqualBlocks,
    KVCacheView,
    QueryBlock,
    SamplingRules,
    TreePlan,
    send,
)
from paceline.kernels.trees import ContextBlock

SEQUENCES = (1, 2, 4, 8, 16, 32)  # sequences that graphs are made for
FED = (8, 17)  # new positions of each text
# Places of caches are multiples of it, for wide loads; fewer positions a page are not gathered.
# Unit: elements.
ALIGN = 16

# What is done with logits at T = 0, at T > 0, and with top-k, top-p or min-p.
NOISES = ("none", "noise", "filters")


class DenseCache(Protocol):
    """A cache whose keys and values lie dense, ``[layers, 2, Hkv, slots, D]``."""

    address: int  # where they begin
    slots: int  # positions that there is room for


class GraphModel(KvLayers, LevelModel, Protocol):
    """A model whose drafts can be captured."""

    def pass_shapes(self, fed: int, shape: TreeShape) -> Sequence[PassShape]:
        """Return the shapes of a draft's passes for texts with ``fed`` new positions."""


class GraphGrowth(LevelGrowth):
    """Growth by the graph of the next larger shape, captured at its first use or before.

    A graph that cannot be captured is left out: its batches are drafted for kernel by kernel. On
    the CPU, without graphs, it runs the same kernels with the same tables. Not thread-safe.
    """

    replays = True
    _model: GraphModel

    def __init__(
        self, model: GraphModel, settings: TreeSettings, method: str, gathered_slots: int = 0
    ) -> None:
        """Begin without graphs for the trees of a model; ``method`` is its name in the log.

        ``gathered_slots`` is the maximum number of positions of the target's KV that a draft reads;
        0 if it reads none, or all.
        """
        shape = TreeShape.of(settings.options, settings.max_depth, settings.logits)
        device = settings.device
        super().__init__(model, settings)
        self._method, self._shape = method, shape
        self._passes = {fed: model.pass_shapes(fed, shape) for fed in FED}
        self._graphs: dict[tuple[int, int, str], _Graph | None] = {}
        self._capturing = Capturing(device)
        heads, slots = model.config, gathered_slots
        with torch.inference_mode(False):
            self._bases = [
                torch.zeros(
                    count, heads.kv_heads, 1, heads.head_dim,
                    dtype=model.dtype, device=device,
                )
                for count in (model.cached_layers, model.context_layers)
            ]  # fmt: skip
            # The target's KV of each sequence, shared by all graphs.
            self._gathered = self._bases[1].new_zeros(
                SEQUENCES[-1] * bool(slots), 2, heads.kv_heads, -(-slots // ALIGN) * ALIGN,
                heads.head_dim,
            )  # fmt: skip
            nodes = shape.stops[-1]
            self._results = device_of(device).host_zeros(
                SEQUENCES[-1], nodes, 4, dtype=torch.float64
            )

    def warm_up(self) -> None:
        """Capture all graphs, the largest first, and log how many there are. Their kernels are
        compiled before, for the largest graph: smaller ones have the same, except that products of
        quantised weights have tiles by their numbers of rows. Raises ``DeviceLost`` if
        the device fails every call since a graph was captured."""

        def draft(sequences: int, fed: int, noise: str) -> None:
            self._make(sequences, fed, noise).draft()

        passes = [partial(draft, SEQUENCES[-1], FED[-1], noise) for noise in NOISES]
        if self._model.bits:
            sizes = product(SEQUENCES, FED)
            passes += [partial(draft, *size, NOISES[0]) for size in sizes]
        with torch.inference_mode():
            self._capturing.compile(passes)
        for noise in NOISES:
            for sequences in reversed(SEQUENCES):
                for fed in reversed(FED):
                    self.graph(sequences, fed, noise)
        self._capturing.release()
        self._capturing.report(f"drafts of {self._method}")
        self.replays = self._capturing.captured > 0

    def replay(
        self,
        draft: HostDraft,
        rankers: Sequence[Ranker],
        lengths: Sequence[int],
        last: Sequence[int],
    ) -> Tensor | None:
        """Draft for a batch by its passes, and by the ranker, the number of tokens and ``last``, as
        of :class:`LevelTrees`, of each sequence. Returns what :meth:`LevelTrees.packed` does, on
        the CPU, valid until the next call; None if no graph is large enough or could be captured,
        the trees have another shape, or a cache cannot be read by wide loads."""
        sequences = next((n for n in SEQUENCES if n >= len(rankers)), 0)
        fed = next((n for n in FED if self._fits(draft, sequences, n)), None)
        if fed is None or rankers[0].count != self._shape.count:
            return None
        params = [ranker.params for ranker in rankers]
        noise = NOISES[max(map(_noise, params))]
        graph = self.graph(sequences, fed, noise)
        if graph is None or not graph.fill(draft, params, lengths, last):
            return None
        results = self._results[: len(rankers)]
        results.copy_(graph.run()[: len(rankers)], non_blocking=True)
        device_of(self._settings.device).wait()
        return results

    def _fits(self, draft: HostDraft, sequences: int, fed: int) -> bool:
        for host_pass, shape in zip(draft.passes, self._passes[fed], strict=True):
            equal = isinstance(host_pass.blocks, EqualBlocks)
            blocks = host_pass.blocks[:1] if equal else host_pass.blocks
            widest = max((block.length for block in blocks), default=0)
            if widest > shape.rows or len(host_pass.positions) > sequences * shape.rows:
                return False
        return True

    def graph(self, sequences: int, fed: int, noise: str) -> _Graph | None:
        """Return the graph for one of :data:`SEQUENCES`, :data:`FED` and :data:`NOISES`; None: it
        could not be captured."""
        key = (sequences, fed, noise)

        def make() -> _Graph:
            graph = self._make(sequences, fed, noise)
            with torch.inference_mode():
                graph.run = self._capturing.capture(graph.draft)
            return graph

        if key not in self._graphs:
            name = f"{sequences} texts with {fed} new positions (noise: {noise})"
            self._graphs[key] = self._capturing.attempt(name, make)
        return self._graphs[key]

    def _make(self, sequences: int, fed: int, noise: str) -> _Graph:
        memory = self._bases, self._gathered[:sequences]
        return _Graph(
            self._model, self._settings, self._shape, memory, sequences, self._passes[fed], noise
        )


def _noise(params: SamplingRules) -> int:
    if params.greedy:
        return 0
    return 2 if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else 1


class _Placed:
    """The caches of all sequences, whose places are in a table; a ``KVCacheView``."""

    table = None

    def __init__(self, bases: Tensor) -> None:
        self._bases = bases

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return what the places of a layer are relative to; kernels find the table by it."""
        return self._bases[index], self._bases[index]


class _Graph(Passes):
    """The CUDA graph of one draft, its input tables and its forward passes."""

    def __init__(
        self,
        model: GraphModel,
        settings: TreeSettings,
        shape: TreeShape,
        memory: tuple[Sequence[Tensor], Tensor],
        sequences: int,
        passes: Sequence[PassShape],
        noise: str,
    ) -> None:
        bases, self._gathered = memory
        device, dtype = settings.device, bases[0].dtype
        contexts = [Context(_Placed(bases[1]), 1)] if len(bases[1]) else []
        super().__init__(HostDraft([], [_Placed(bases[0])], contexts), device)
        self._model, self._drafted = model, settings.drafted_on_device
        self._shape, self._noise, self._sequences = shape, noise, sequences
        self._bases = bases
        self._shapes = passes
        self.run: Callable[[], Tensor] = self.draft
        shapes: list[Shape] = []

        def add(*more: Shape) -> slice:
            shapes.extend(more)
            return slice(len(shapes) - len(more), len(shapes))

        def numbers(*size: int, dtype: torch.dtype = torch.int64) -> int:
            add((dtype, size))
            return len(shapes) - 1

        self._last = numbers(sequences, 1)
        parents = (1, *shape.sizes)
        self._records = [numbers(sequences * parents[n], 6) for n in range(len(shape.sizes))]
        self._places = [[numbers(2 * sequences, 3) for _ in base] for base in bases]
        pages = self._gathered.shape[3] // ALIGN + 3 if len(self._gathered) else 0
        self._kv_records = numbers(sequences * bool(pages), RECORD)
        self._kv_pages = numbers(sequences, pages, dtype=torch.int32)
        self._states = [
            numbers(sequences * size.rows * bool(size.inputs), size.taps) for size in self._shapes
        ]
        self._given = [
            (numbers(sequences * size.rows * size.tokens), numbers(sequences * size.logit_rows))
            for size in self._shapes
        ]
        # A tree is no deeper than the rows of its passes.
        max_position = settings.max_position + max(size.rows for size in self._shapes)
        tables = []
        for size in self._shapes:
            rows, blocks = sequences * size.rows, sequences * size.blocks
            for windows in (size.windows, size.contexts):
                tilings = self._tilings(windows)
                wanted = TableShape.of(rows, blocks, tilings, max_position, bases[0])
                tables.append((add(*wanted.tables), wanted))
        self._staging = Staging(shapes, device)
        placed = [PassTables(self._staging, at.start, wanted) for at, wanted in tables]
        self._tables = list(zip(placed[::2], placed[1::2], strict=True))
        with torch.inference_mode(False):
            self._zeros = torch.zeros(4, dtype=torch.int32, device=device)
            self._inputs = [
                torch.zeros(sequences * size.rows, size.inputs, dtype=dtype, device=device)
                for size in self._shapes
            ]
        self.clear()

    def _tilings(self, windows: Sequence[int | None]) -> tuple[Tiling, ...]:
        return tilings_for(self._model.config.group, self._bases[0], windows)

    def clear(self) -> None:
        """Write an empty batch to the tables."""
        self.fill(HostDraft([HostPass()] * len(self._shapes), []), [], [], [])

    def fill(
        self,
        draft: HostDraft,
        params: Sequence[SamplingRules],
        lengths: Sequence[int],
        last: Sequence[int],
    ) -> bool:
        """Write a batch to the tables; arguments as of :meth:`GraphGrowth.replay`. Returns False if
        a cache cannot be read by wide loads, or for more work than there is room for."""
        host = self._staging.host
        self._staging.wait()
        contexts = [context.cache for context in draft.contexts]
        if not self._fill_places(0, draft.caches) or not self._fill_places(1, contexts):
            return False
        _fill(host[self._last], np.array(last, np.int64)[:, None])
        self._fill_records(params, lengths)
        numbers = range(self._sequences)
        for index, entry in enumerate(draft.passes):
            tokens, rows = self._given[index]
            _fill(host[tokens], entry.tokens)
            _fill(host[rows], entry.logit_rows)
            texts, context = self._tables[index]
            attended = context_blocks(entry, draft.contexts) if self._shapes[index].contexts else []
            if not texts.fill(entry.blocks, numbers, entry.positions):
                return False
            if not context.fill(attended, numbers):
                return False
            self._fill_states(index, entry.inputs)
        self._staging.send()
        return True

    def _fill_places(self, kind: int, caches: Sequence[KVCacheView]) -> bool:
        """Write where the caches of the texts (0) or their contexts (1) lie; returns whether wide
        loads can read them."""
        bases, count = self._bases[kind], len(caches)
        layers, heads, _, dim = bases.shape
        stores = np.zeros((count, 2), np.int64)
        others: list[tuple[int, TargetKv]] = []
        if kind and len(self._gathered):
            self._staging.host[self._kv_records][:] = 0
        for index, cache in enumerate(caches):
            if not isinstance(cache, TargetKv):
                window = cast(DenseCache, cache)
                stores[index] = window.address, window.slots
            elif self._fill_pages(index, cache.pages):
                text = index * self._gathered.stride(0) * bases.element_size()
                stores[index] = self._gathered.data_ptr() + text, self._gathered.shape[3]
            else:
                others.append((index, cache))
        wide = True
        for layer in range(layers):
            base = bases[layer].data_ptr()
            table = self._staging.host[self._places[kind][layer]]
            places = table[: 2 * count].reshape(count, 2, 3)
            plane = heads * dim * stores[:, 1]
            for part in (0, 1):
                places[:, part, 0] = (stores[:, 0] - base) // bases.element_size()
                places[:, part, 0] += (2 * layer + part) * plane
            places[..., 1], places[..., 2] = (stores[:, 1] * dim)[:, None], dim
            for index, other in others:
                for part, tensor in enumerate(other.layer(layer)):
                    origin = (tensor.data_ptr() - base) // bases.element_size()
                    places[index, part] = origin, *tensor.stride()[:2]
            table[2 * count :] = 0
            wide = wide and not (places % ALIGN).any()
        return wide

    def _fill_pages(self, index: int, pages: KvPages | None) -> bool:
        """Write where the KV that is gathered for a sequence lies; returns False if it cannot be
        gathered."""
        if pages is None or not len(self._gathered):
            return False
        heads, size, dim = pages.shape
        _, _, own_heads, slots, own_dim = self._gathered.shape
        table = self._staging.host[self._kv_pages]
        if (
            (pages.dtype, heads, dim) != (self._gathered.dtype, own_heads, own_dim)
            or pages.length > slots
            or len(pages.pages) > table.shape[1]
        ):
            return False
        item = pages.dtype.itemsize
        origin = (pages.address - self._bases[1].data_ptr()) // item
        stride = pages.page_bytes // item
        if origin % ALIGN or stride % ALIGN:
            return False
        record = (origin, stride, size, pages.length, pages.first)
        self._staging.host[self._kv_records][index] = record
        table[index, : len(pages.pages)] = pages.pages
        return True

    def _fill_states(self, number: int, inputs: StateRows | None) -> None:
        """Write where the hidden states of a pass lie, and copies those that do not lie in
        pages."""
        if not self._shapes[number].inputs:
            return
        table, rows = self._staging.host[self._states[number]], self._inputs[number]
        table[:] = NO_PLACE
        if inputs is None:
            return
        begin = 0
        for block in inputs.blocks:
            end = begin + block.count * inputs.repeats
            places = self._places_of(block, rows)
            if places is not None:
                table[begin:end] = places.repeat(inputs.repeats, axis=0)
            else:
                rows[begin:end].copy_(send(inputs.rows(block), rows.device), non_blocking=True)
            begin = end

    def _places_of(self, block: StateSlice, rows: Tensor) -> NDArray[np.int64] | None:
        """Return places of hidden states for the kernel that gathers rows; None if it cannot."""
        if block.addresses is None or block.dtype != rows.dtype or not block.count:
            return None
        places: NDArray[np.int64] = block.addresses - self._bases[0].data_ptr()
        places //= rows.element_size()
        wide = rows.shape[1] // places.shape[1] % ALIGN == 0
        return None if wide and (places % ALIGN).any() else places

    def _fill_records(self, params: Sequence[SamplingRules], lengths: Sequence[int]) -> None:
        missing = self._sequences - len(params)
        padded = [*params, *[SamplingRules(temperature=0.0)] * missing]
        base = sampling_record(padded, [*lengths, *[0] * missing])
        for level, table in enumerate(self._records):
            rows = self._staging.host[table]
            rows[:] = base.repeat(len(rows) // len(base), axis=0)
            rows[:, 1] += level

    def draft(self) -> Tensor:
        """Return the draft of the batch in the tables; see :meth:`LevelTrees.packed`."""
        tables = self._staging.device
        if len(self._gathered):
            records, pages = tables[self._kv_records], tables[self._kv_pages]
            gather_kv(self._bases[1], records, pages, self._gathered)
        for shape, places, rows in zip(self._shapes, self._states, self._inputs, strict=True):
            if shape.inputs:
                gather_states(self._bases[0], tables[places], rows)
        last = tables[self._last]
        trees = LevelTrees(self._shape, last, self._rank, kernels=True)
        self._model.grow(self, trees)
        return trees.packed()

    def _rank(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        record = None if self._noise == "none" else self._staging.device[self._records[level]]
        scores, width = logits[:, : self._shape.count], self._shape.widths[level]
        return best_of_rows(
            scores, min(width, self._shape.count), record, self._drafted,
            filtered=self._noise == "filters",
        )  # fmt: skip

    def plan(self, index: int, trees: LevelTrees | None = None) -> TreePlan:
        texts, context = (
            {
                base.data_ptr(): Places(self._staging.device[table], self._zeros, wide=True)
                for base, table in zip(bases, tables, strict=True)
            }
            for bases, tables in zip(self._bases, self._places, strict=True)
        )
        of_texts, of_contexts = self._tables[index]
        plan = of_texts.plan(None if trees is None else trees.ancestors, texts)
        plan.contexts = of_contexts.plan(places=context)
        return plan

    def tokens(self, index: int) -> Tensor:
        return self._staging.device[self._given[index][0]]

    def logit_rows(self, index: int) -> Tensor:
        return self._staging.device[self._given[index][1]]

    def inputs(self, index: int) -> Tensor | None:
        states = self._inputs[index]
        return self._model.states(states) if self._shapes[index].inputs else None


def context_blocks(host_pass: HostPass, contexts: Sequence[Context]) -> Sequence[QueryBlock]:
    """Return the blocks of a pass as rows that attend to the whole contexts."""
    last = [context.length - 1 for context in contexts]
    if isinstance(host_pass.blocks, EqualBlocks):
        first = ContextBlock(0, last[0], None, host_pass.blocks.first.length)
        return EqualBlocks(first, np.array(last, np.int64))
    return [
        ContextBlock(block.sequence, last[block.sequence], None, block.length)
        for block in host_pass.blocks
    ]


def _fill(table: NDArray[Any], numbers: Sequence[int] | NDArray[Any]) -> None:
    """Write the first rows of a table, and zeros to the others."""
    table[: len(numbers)] = numbers
    table[len(numbers) :] = 0
