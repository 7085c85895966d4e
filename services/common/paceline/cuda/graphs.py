"""Forward passes captured as CUDA graphs, for padded batches over a pool of pages.

A step of a large model is some hundred small kernels, each of which takes longer to launch than to
run. A graph replays them with one launch. It contains the whole pass: embedding, writing of KV,
attention, hidden states, logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.cuda.triton.ahead import compile_ahead
from paceline.cuda.triton.plan import GraphPlan
from paceline.cuda.triton.tiles import Tiling, tilings_for
from paceline.decoder.model import Decoder, ForwardResult
from paceline.device import SHAPES, device_of
from paceline.kernels import GraphProbes, KVCacheView, PagedPlane, Probe, ProbedBlock, QueryBlock

_log = logging.getLogger(__name__)
T = TypeVar("T")
Pass = Callable[[], ForwardResult]

# Packed rows that graphs are made for where products have fixed numbers of rows; see
# :mod:`paceline.cuda.products`.
FIXED_SHAPES = (64, 128, 192, 256, 384, 512)


class Capturing:
    """Captures CUDA graphs, which share their memory: only one runs at a time.

    All are captured on one stream, since libraries keep a workspace for each stream.
    """

    def __init__(self, device: torch.device, *, required: bool = False) -> None:
        """Prepare captures on a device; if graphs are ``required``, one that cannot be captured is
        an error."""
        # Graphs that :meth:`attempt` has captured, and those that could not be captured.
        self.captured = self.failed = 0
        self._required = required
        self._device = device
        self._memory: Any = None
        self._stream: Any = None

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """Capture a function without arguments that only launches kernels. Returns one that
        launches them again, and returns the same tensors, which the next call overwrites. On
        devices without graphs it is ``run``."""
        if self._device.type != "cuda":
            if self._device.type == "meta":  # compiles kernels for a GPU that is not there
                run()
            return run
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and allocates workspaces
            run()
            # PyTorch's context manager for captures also waits for the whole device and empties
            # its allocator's cache, for each graph, which stalls other threads.
            self._stream.synchronize()
            # Other threads use the device meanwhile, such as those that read KV for drafters.
            pool = {} if self._memory is None else {"pool": self._memory}
            graph.capture_begin(capture_error_mode="thread_local", **pool)
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken, and has to end
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self._memory = graph.pool()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """Make a graph by :meth:`capture`, and count it; ``name`` tells it from others in the log.

        Returns what ``make`` returns; None if it fails, for whatever reason: then others have to
        run what the graph would replay. The first failure is logged, further ones are counted.
        Raises ``DeviceLost`` if the device fails every call since, and what ``make`` raises if
        graphs are required.
        """
        try:
            made = make()
        except Exception as error:  # of kernels, their compiler, the driver: any that there is
            if self._required:
                raise
            if (lost := device_of(self._device).lost()) is not None:
                raise lost from error
            if not self.failed:
                _log.warning(
                    "no CUDA graph of %s, whose work runs kernel by kernel: %s", name, error,
                    exc_info=True,
                )  # fmt: skip
            self.failed += 1
            return None
        self.captured += 1
        return made

    def report(self, name: str) -> None:
        """Log how many graphs there are so far, and how many could not be captured; ``name`` says
        what they are graphs of."""
        failed = f"; {self.failed} could not be captured" if self.failed else ""
        level = logging.WARNING if self.failed else logging.INFO
        _log.log(level, "CUDA graphs of %s: %d%s", name, self.captured, failed)

    def compile(
        self,
        passes: Iterable[Callable[[], object]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile the kernels that functions launch before they are captured; see
        :func:`~paceline.cuda.triton.ahead.compile_ahead`. On the CPU nothing is compiled."""
        if self._device.type != "cpu":
            compile_ahead(passes, progress)

    def release(self) -> None:
        """Give back the memory of the runs before captures, which no other stream can use; once,
        behind the last of several captures."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class GraphRunner:
    """Runs batches by the graph of the next larger shape, captured at its first use or before.

    A graph that cannot be captured is left out: its batches are for others to run. On the CPU,
    without graphs, it runs the same kernels with the same tables. Not thread-safe; the next call
    overwrites what a call returned.
    """

    def __init__(self, decoder: Decoder, planes: KVCacheView, *, required: bool = False) -> None:
        """Make a runner without graphs; ``planes`` are the cache of any sequence in the pool. If
        graphs are ``required``, one that cannot be captured is an error."""
        self.shapes = SHAPES if decoder.products is None else FIXED_SHAPES
        self._decoder = decoder
        self._planes = planes
        key = planes.layer(0)[0]
        assert isinstance(key, PagedPlane), "graphs need KV in pages"
        self._keys = key.pool
        self._graphs: dict[tuple[object, ...], tuple[GraphPlan, Pass] | None] = {}
        self._capturing = Capturing(self._keys.device, required=required)
        self._tapped: list[tuple[int, ...]] = []  # layers that graphs return, the newest set first
        # One for all graphs, whose own would take gigabytes.
        self._logits: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of graphs captured so far."""
        return self._capturing.captured

    @property
    def failed(self) -> int:
        """Graphs that could not be captured."""
        return self._capturing.failed

    def forward(
        self,
        tokens: Sequence[int],
        blocks: Sequence[QueryBlock],
        table_rows: Sequence[int],
        taps: Sequence[int] = (),
        probed_layers: Sequence[int] = (),
        probed: Sequence[ProbedBlock] = (),
    ) -> ForwardResult | None:
        """Run packed query blocks and write their keys and values.

        Args:
            tokens: Packed tokens.
            blocks: Their blocks; ``block.sequence`` indexes ``table_rows``.
            table_rows: Row of the page tables of each sequence.
            taps: Layers whose outputs to return, 0 for the first.
            probed_layers: Layers without a window whose scores are recorded, in rising order; as
                many as the layers of each buffer in ``probed``.
            probed: Blocks whose scores are recorded, each once.

        Returns logits of all rows, and taps; None if no shape is large enough, its graph could not
        be captured or has no room for so many chunks of keys, or scores are to be recorded of heads
        whose group is larger than a tile. Raises ``DeviceLost`` as :meth:`Capturing.attempt`.
        """
        rows = next((shape for shape in self.shapes if shape >= len(tokens)), None)
        tilings = self._tilings()
        if rows is None or (probed and any(tiling.group > tiling.rows for tiling in tilings)):
            return None
        again = any(block.again for block in probed)
        tapped = self._wider(rows, tilings, tuple(taps), tuple(probed_layers), again)
        graph = self._graph(rows, tilings, tapped, tuple(probed_layers), again=again)
        if graph is None:
            return None
        plan, run = graph
        if not plan.fill(tokens, blocks, table_rows, probed):
            return None
        result = run()
        count = len(tokens)
        outputs = dict(zip(tapped, result.taps, strict=True))
        return ForwardResult(result.logits[:count], tuple(outputs[layer][:count] for layer in taps))

    def prepare(
        self, blocks: Sequence[QueryBlock], table_rows: Sequence[int], taps: Sequence[int] = ()
    ) -> None:
        """Fill the tables of a batch that may come next, but for its tokens: :meth:`forward` then
        only adds these. For the time in which a GPU computes; arguments as there."""
        count = sum(block.length for block in blocks)
        rows = next((shape for shape in self.shapes if shape >= count), None)
        if rows is None:
            return
        tilings = self._tilings()
        tapped = self._wider(rows, tilings, tuple(taps), (), False)
        graph = self._graphs.get((rows, tilings, tapped, (), False))
        if graph is not None:
            graph[0].prepare(blocks, table_rows)

    def _wider(
        self, rows: int, tilings: tuple[Tiling, ...], taps: tuple[int, ...],
        probed: tuple[int, ...], again: bool,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the taps of a graph that returns at least these, of a captured one if possible."""
        sets = [layers for layers in self._tapped if taps and set(taps) <= set(layers)]
        made = [layers for layers in sets if (rows, tilings, layers, probed, again) in self._graphs]
        return next(iter([*made, *sets]), taps)

    def compile(
        self,
        others: Sequence[Callable[[], object]] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile the kernels of the graphs that :meth:`warm_up` captures, and of ``others``,
        side by side: the largest graph has all of them. ``progress`` is called with the number of
        kernels compiled so far, and of all."""

        def largest() -> None:
            self._pass(self._plan(self.shapes[-1], self._tilings()), (), ())()

        self._capturing.compile([largest, *others], progress)

    def warm_up(self, taps: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Capture the graphs of all steps without scores, the largest first. Yields how many are
        captured so far, and their number.

        Each graph takes seconds if its kernels have to be compiled. Steps with some of the ``taps``
        then use the graphs of all of them.
        """
        layers = tuple(taps)
        if layers and layers not in self._tapped:
            self._tapped.insert(0, layers)
        for count, rows in enumerate(reversed(self.shapes), 1):
            self._graph(rows, self._tilings(), layers, ())
            if count == len(self.shapes):
                self._capturing.release()
            yield count, len(self.shapes)

    def report(self) -> None:
        """Log how many graphs there are so far, and how many could not be captured."""
        self._capturing.report("steps")

    def _tilings(self) -> tuple[Tiling, ...]:
        """Return the tilings of all kinds of layers."""
        config = self._decoder.config
        return tilings_for(config.group, self._keys, config.windows)

    def _graph(
        self,
        rows: int,
        tilings: tuple[Tiling, ...],
        taps: tuple[int, ...],
        probed: tuple[int, ...],
        *,
        again: bool = False,
    ) -> tuple[GraphPlan, Pass] | None:
        """Plan and graph of a shape, captured if there is none; ``again``: see ``ProbedBlock``.
        None: it could not be captured."""
        key = (rows, tilings, taps, probed, again)

        def make() -> tuple[GraphPlan, Pass]:
            plan = self._plan(rows, tilings, probes=bool(probed), weights=again)
            return plan, self.capture(plan, taps, probed)

        if key not in self._graphs:
            self._graphs[key] = self._capturing.attempt(f"{rows} rows", make)
        return self._graphs[key]

    def _plan(self, rows: int, tilings: tuple[Tiling, ...], **recorded: bool) -> GraphPlan:
        max_position = self._decoder.config.max_position - 1
        return GraphPlan(rows, self._keys, tilings, max_position, **recorded)

    def capture(self, plan: GraphPlan, taps: Sequence[int], layers: Sequence[int]) -> Pass:
        """Capture a pass over an empty batch: rows of padding write nothing."""
        return self._capturing.capture(self._pass(plan, taps, layers))

    def _pass(self, plan: GraphPlan, taps: Sequence[int], layers: Sequence[int]) -> Pass:
        observer = _GraphObserver(layers) if layers else None

        def run() -> ForwardResult:
            result = self._decoder.forward(
                plan.tokens, plan.plan, [self._planes],
                logit_rows=None, taps=taps, observer=observer,
            )  # fmt: skip
            if self._logits is None:
                vocab = result.logits.shape[1]
                self._logits = result.logits.new_empty(self.shapes[-1], vocab)
            return ForwardResult(self._logits[: plan.rows].copy_(result.logits), result.taps)

        return run


class _GraphObserver:
    """Records the scores that the plan's tables name; an ``AttentionObserver``."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._indices = {layer: index for index, layer in enumerate(layers)}

    def probes(self, layer: int) -> Sequence[Probe]:
        return GraphProbes(self._indices[layer]) if layer in self._indices else ()

    def rows(self, layer: int) -> Sequence[int]:
        """Want no queries."""
        return ()

    def attended(self, layer: int, q: Tensor) -> None:
        """Never called."""
