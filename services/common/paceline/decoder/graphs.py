"""Forward passes captured as CUDA graphs, for padded batches over a pool of pages.

A step of a large model is some hundred small kernels, each of which takes the CPU longer to start
than the GPU to run. Replayed as one graph they cost one start. Everything is inside: embedding,
writing of KV, attention, hidden states, logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.decoder.cache import KVCacheView
from paceline.decoder.model import Decoder, ForwardResult
from paceline.kernels import NotedBlock, PagedPlane, PlannedProbes, Probe, TreeSegment

if TYPE_CHECKING:
    from paceline.kernels.graphs import GraphPlan

SHAPES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Packed rows that graphs are made for. Larger batches, of prefills say, gain nothing by them."""


class GraphRunner:
    """Runs batches by the graph of the next larger shape, which it captures when first needed.

    On the CPU, where there are no graphs, it runs the same tables through the same kernels. One
    thread at a time; what a call returns is overwritten by the next.
    """

    def __init__(self, decoder: Decoder, planes: KVCacheView) -> None:
        """Make a runner without graphs.

        Args:
            decoder: The model.
            planes: A cache in the pool that all batches are about, whichever sequence's.
        """
        self._decoder = decoder
        self._planes = planes
        key = planes.layer(0)[0]
        assert isinstance(key, PagedPlane), "graphs need KV in pages"
        self._keys = key.pool
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._memory: Any = None

    def __len__(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def forward(
        self,
        tokens: Sequence[int],
        segments: Sequence[TreeSegment],
        table_rows: Sequence[int],
        taps: Sequence[int] = (),
        noted_layers: Sequence[int] = (),
        noted: Sequence[NotedBlock] = (),
    ) -> ForwardResult | None:
        """Run packed query blocks and write their keys and values.

        Args:
            tokens: Packed tokens.
            segments: Their blocks; ``segment.sequence`` indexes ``table_rows``.
            table_rows: Row of the page tables of each sequence.
            taps: Layers whose outputs to return, 0 for the first.
            noted_layers: Layers without a window whose scores to note, rising; the same number as
                the layers of each room in ``noted``.
            noted: Blocks whose scores to note there.

        Returns:
            Logits of all rows, and taps; None where no shape is large enough.
        """
        rows = next((shape for shape in SHAPES if shape >= len(tokens)), None)
        if rows is None:
            return None
        # Here, since nothing else of the decoder needs Triton.
        from paceline.kernels.graphs import GraphPlan, tilings_for

        config = self._decoder.config
        widest = max(segment.length for segment in segments)
        tilings = tilings_for(widest, config.group, self._keys, config.windows)
        key = (rows, tilings, tuple(taps), tuple(noted_layers))
        graph = self._graphs.get(key)
        if graph is None:
            longest = config.max_position - 1
            plan = GraphPlan(rows, self._keys, tilings, longest, notes=bool(noted_layers))
            graph = self._graphs[key] = self._capture(plan, taps, noted_layers)
        graph.plan.fill(tokens, segments, table_rows, noted)
        result = graph.run()
        count = len(tokens)
        return ForwardResult(result.logits[:count], tuple(tap[:count] for tap in result.taps))

    def _capture(self, plan: GraphPlan, taps: Sequence[int], noted_layers: Sequence[int]) -> _Graph:
        """Capture a pass over nothing: rows that are padding write nowhere."""
        observer = _Planned(noted_layers) if noted_layers else None

        def run() -> ForwardResult:
            return self._decoder.forward(
                plan.tokens, plan.plan, [self._planes],
                logit_rows=None, taps=taps, observer=observer,
            )  # fmt: skip

        if self._keys.device.type != "cuda":
            return _Graph(plan, run)
        stream = torch.cuda.Stream(self._keys.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled, workspaces made
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile, such as those that read KV for followers.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = run()
        self._memory = graph.pool()

        def replay() -> ForwardResult:
            graph.replay()
            return result

        return _Graph(plan, replay)


class _Planned:
    """Lets layers note what their plan's tables say; an ``AttentionObserver``."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}

    def probes(self, layer: int) -> Sequence[Probe]:
        """See :class:`paceline.decoder.AttentionObserver`."""
        return PlannedProbes(self._places[layer]) if layer in self._places else ()

    def attended(self, layer: int, q: Tensor) -> None:
        """Nothing: where notes are is told with each batch."""


class _Graph:
    """A captured pass: fill the plan, then run."""

    def __init__(self, plan: GraphPlan, run: Any) -> None:
        self.plan = plan
        self.run = run


def table_row(cache: KVCacheView) -> int:
    """The row of the page tables that a paged cache has."""
    key = cache.layer(0)[0]
    assert isinstance(key, PagedPlane), "graphs need KV in pages"
    return key.row
