"""What rounds and drafts cost the host of a GPU, measured without one: kernels, graphs and waits do
nothing.

All else is what serves: the engine and its thread, the scheduler, the tables of graphs, messages of
a drafter service, which answers at once. Where a step waits for the GPU, its thread sleeps, and
gets made-up tokens. What a step launches behind its graph, and a draft beside it, runs on the CPU
on tensors of a few kB: on a GPU each of these operations takes the host some microseconds too. Not
measured are the launches of graphs themselves, and messages to clients, which are written while a
GPU computes.

    python -m paceline.bench.gpu.host cpu 0      # reports lines of JSON

Figures are medians in microseconds. ``between`` is what a GPU waits for: from the end of a step's
wait to the next replay, without the time of the drafter. ``step`` and ``draft`` are all of the
host's time in them. They are processor time of the thread, which other processes change little;
``wall`` is what has passed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.bench.gpu.cases import EIGHT_BILLION, SMALL, arguments, report
from paceline.bench.gpu.drafts import BUDGET, CONTEXT, NEW, PAGE, PoolKv, PoolStates, write_ends
from paceline.bench.gpu.rounds import SEQUENCES, write_drafters
from paceline.decoder import Decoder, DecoderConfig, ForwardResult, GraphRunner
from paceline.decoder.graphs import Pass
from paceline.drafter import GenerationInfo, Resources, Update
from paceline.drafter.growth.device import DeviceGrowth
from paceline.drafter.growth.graphs import SEQUENCES as LARGEST
from paceline.drafter.growth.graphs import DraftGraphs, GraphModel
from paceline.drafter.growth.sequence import TreeGrowth
from paceline.drafter.growth.text import TreeSettings
from paceline.drafter.methods import method_class
from paceline.kernels.triton.plan import GraphPlan
from paceline.service import limits
from paceline.service.messages import parse
from paceline.tree import MAX_NODES, TokenTree
from paceline.v1 import exchange_pb2, sampling_pb2
from paceline.verifier.engine import acceptance, job
from paceline.verifier.engine.drafting import Link
from paceline.verifier.engine.engine import Engine
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagedKv, PagePool
from paceline.verifier.scheduler.costs import flat_table
from paceline.verifier.scheduler.scheduler import Scheduler

STEPS, WARM = 300, 30
"""Steps, or drafts, of a case, and those of them that are not measured."""

GPU_SECONDS = 0.002
"""Time for which a step waits. Unit: seconds."""

TOKEN = 5
"""What the made-up target chooses at every position."""

TREE = TokenTree(
    (TOKEN, TOKEN, 6, TOKEN, 7, 8, 9, 6), (-1, 0, -1, 1, 0, 3, 2, 1),
    (0.7, 0.7, 0.25, 0.5, 0.3, 0.7, 0.6, 0.3),
)  # fmt: skip
"""What the made-up drafter drafts, the likeliest first, as drafters do. Three nodes are right."""

META = torch.device("meta")
"""PyTorch's device whose tensors have no memory."""

TARGET = replace(
    EIGHT_BILLION, layers=1, hidden=64, q_heads=4, kv_heads=1, vocab_size=64, windows=(None,)
)
"""A target whose steps have as many work items as those of 8B."""

Moment = NDArray[np.float64]
"""Processor time of the thread, and the clock. Unit: seconds."""


def now() -> Moment:
    """This moment."""
    return np.array([time.thread_time(), time.perf_counter()])


def medians(times: Sequence[Moment], name: str) -> dict[str, float]:
    """Medians of times, without the first ones, by names that begin with ``name``. Unit:
    microseconds."""
    processor, wall = (np.median(times[WARM:], axis=0) * 1e6).tolist()
    return {f"{name}_us": round(processor, 1), f"{name}_wall_us": round(wall, 1)}


class Clock:
    """Notes the times of an engine's steps."""

    def __init__(self) -> None:
        self.between: list[Moment] = []
        """From the end of each step's wait to the next replay."""
        self.behind: list[Moment] = []
        """From each replay to the wait behind it."""
        self._last = now()

    def replay(self) -> None:
        """A graph is replayed."""
        self.between.append(now() - self._last)
        self._last = now()

    def wait(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The engine waits for tokens; stands for :func:`paceline.decoder.device.receive`."""
        self.behind.append(now() - self._last)
        found = [torch.full(each.shape, TOKEN, dtype=each.dtype) for each in tensors]
        time.sleep(GPU_SECONDS)
        self._last = now()
        return found

    def leave_out(self, began: Moment) -> None:
        """What the thread did since then is not the engine's."""
        self._last += now() - began


class NoGraphs(GraphRunner):
    """Graphs that compute nothing, of a model on :data:`META`."""

    def __init__(self, pool: PagePool, replay: Callable[[], None]) -> None:
        """Take the KV, and what a replay calls."""
        super().__init__(model(), pool)
        self._replay = replay

    def capture(self, plan: GraphPlan, taps: Sequence[int], layers: Sequence[int]) -> Pass:
        logits = torch.empty(plan.rows, TARGET.vocab_size, dtype=TARGET.dtype, device=META)
        states = torch.empty(len(taps), plan.rows, TARGET.hidden, device=META)

        def run() -> ForwardResult:
            self._replay()
            return ForwardResult(logits, tuple(states))

        return run


def model() -> Decoder:
    """A model of which there is nothing but what the engine asks for."""
    fields = {"config": TARGET, "device": META, "products": object(), "lost": lambda: None}
    return cast(Decoder, SimpleNamespace(**fields))


class TinyPool(PagePool):
    """KV on the CPU, which the paths of made-up tokens are kept of."""

    def keep_accepted(
        self, blocks: Sequence[tuple[PagedKv, int, TokenTree, int]], chosen: Tensor
    ) -> Tensor:
        return super().keep_accepted(blocks, torch.full(chosen.shape, TOKEN))


class AllNodes(Scheduler):
    """Verifies all nodes, whatever it decides."""

    def admit(
        self, jobs: Sequence[job.Decode], trees: Sequence[TokenTree], *args: int
    ) -> list[TokenTree]:
        super().admit(jobs, trees, *args)
        return list(trees)


class InstantDrafter:
    """A drafter service whose answers are there at once."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock, self._tree = engine, clock, TREE.to_proto()
        drafters = exchange_pb2.DrafterList()
        drafters.drafters.add(name="instant", version="1", traffic_share=1.0)
        self.link = Link(drafters, self._take, lambda error: None)
        """Its connection."""

    def _take(self, message: exchange_pb2.JoinResponse) -> None:
        message.SerializeToString()  # as for a socket
        began = now()
        answer = exchange_pb2.JoinRequest()
        for opened in message.open:
            answer.opened.add(sequence=opened.sequence, version="1", max_nodes=len(TREE))
        for asked in message.rounds:
            answer.trees.add(sequence=asked.sequence, round=asked.round, tree=self._tree)
        if answer.ListFields():
            data = answer.SerializeToString()
            self._engine.drafting(
                lambda drafting: drafting.receive(
                    self.link, parse(exchange_pb2.JoinRequest, data, limits.FRAME_BYTES)
                )
            )
        self._clock.leave_out(began)


async def rounds(texts: int, *, trees: bool) -> dict[str, float]:
    """Times of steps of so many texts, each with a tree or none, and the tokens that each emits."""
    clock, layout = Clock(), KvLayout.of(TARGET)
    length = CONTEXT + STEPS * (4 if trees else 1)
    capacity = layout.capacity(length)
    pool = TinyPool(
        layout, torch.device("cpu"), kv_bytes=texts * capacity * layout.token_bytes,
        max_sequences=texts, max_context=length,
    )  # fmt: skip
    engine = Engine(
        model(), graphs=NoGraphs(pool, clock.replay), scheduler=AllNodes(flat_table(), MAX_NODES)
    )
    drafter = InstantDrafter(engine, clock)
    with patch.object(acceptance, "receive", clock.wait):
        engine.start()
        await engine.with_drafting(lambda drafting: drafting.join(drafter.link))
        params = job.GenerationParams(tuple(range(CONTEXT)), length_limit=length)
        kvs = [pool.allocate(capacity, None) for _ in range(texts)]
        sequences = [job.CachedSequence(params, kv) for kv in kvs]
        prefills = [job.Prefill(sequence) for sequence in sequences]
        for prefill in prefills:
            engine.prefill(prefill)
        await _finished(prefills)
        first = len(clock.behind)
        decodes = [
            job.Decode(
                sequence, drafter="instant" if trees else None, always_draft=trees, credits=length
            )
            for sequence in sequences
        ]
        for decode in decodes:
            engine.decode(decode)
        await _finished(decodes)
        await engine.stop()
    for sequence in sequences:
        sequence.kv.close()
    between, behind = clock.between[first:], clock.behind[first:]
    steps = [before + after for before, after in zip(between, behind, strict=True)]
    emitted = [len(output.tokens) for output in decodes[0].outputs]
    return {
        "tokens": float(np.median(emitted)),
        **medians(between, "between"),
        **medians(steps, "step"),
    }


async def _finished(jobs: Sequence[job.EngineJob]) -> None:
    for each in jobs:
        await each.finished()
        if each.error is not None:
            raise each.error


class NoDrafts(DraftGraphs):
    """Graphs of drafts that compute nothing: trees are made up, and have all nodes."""

    def __init__(self, model: GraphModel, settings: TreeSettings) -> None:
        super().__init__(model, settings)
        stops, sizes = self._shape.stops, self._shape.sizes
        numbers = np.arange(stops[-1])
        parents = np.repeat([-1, *stops[:-2]], sizes)  # the first node of the level before
        scores = -0.01 * numbers
        columns = np.stack([numbers, parents, scores, scores], 1)
        self._drafted = torch.from_numpy(columns).expand(LARGEST[-1], -1, -1)

    def graph(self, sequences: int, fed: int, noise: str) -> Any:
        graph = super().graph(sequences, fed, noise)
        assert graph is not None
        graph.run = lambda: self._drafted
        return graph


def load(method: str, folder: Path) -> Any:
    """A drafter that drafts as on a GPU."""
    made = method_class(method)
    options = {**made.gpu_tree, "weights": "float32", "target": str(folder / "target")}
    drafter: Any = made.load(folder / method, options, Resources())
    settings = replace(drafter.settings, drafted_on_device=drafter.settings.drafted)
    growth = DeviceGrowth(drafter, settings, graphs=NoDrafts(drafter, settings))
    drafter.growth = TreeGrowth(drafter.growth.host, growth)
    return drafter


def drafts(drafter: Any, texts: int, config: DecoderConfig) -> dict[str, float]:
    """Times of drafts for so many texts."""
    room = CONTEXT + NEW * (STEPS + 1)
    held, draws = -(-room // PAGE), np.random.default_rng(0)
    pool = torch.zeros(texts * held, 2, config.kv_heads, PAGE, config.head_dim)
    pages = draws.permutation(texts * held).reshape(texts, held)
    sequences, readers = [], []
    for own in pages:
        data: dict[str, Any]
        if layers := drafter.needs.hidden_state_layers:
            data = {"states": PoolStates(torch.zeros(room, len(layers), config.hidden))}
        else:
            data = {"kv": PoolKv(pool, own)}
        (reader,) = data.values()
        reader.paged = True  # as on a GPU
        reader.length = CONTEXT - 1
        greedy = sampling_pb2.SamplingParams()
        text = draws.integers(0, config.vocab_size // 2, CONTEXT).tolist()
        sequence = drafter.start(GenerationInfo(text, CONTEXT, config.vocab_size, greedy, **data))
        while sequence.backlog:
            sequence.warm(512)
        sequences.append(sequence)
        readers.append(reader)
    times, nodes = [], []
    for _ in range(STEPS):
        began = now()
        trees = drafter.draft_many([(sequence, BUDGET) for sequence in sequences])
        times.append(now() - began)
        nodes.append(len(trees[0]))
        for sequence, reader in zip(sequences, readers, strict=True):
            reader.length += NEW
            sequence.extend(Update(draws.integers(0, config.vocab_size // 2, NEW).tolist()))
    for sequence in sequences:
        sequence.close()
    return {"nodes": float(np.median(nodes)), **medians(times, "draft")}


def main() -> None:
    """Report the times of all cases."""
    arguments()
    torch.set_num_threads(1)
    for texts in SEQUENCES:
        for name, trees in (("plain", False), ("trees", True)):
            report(f"{texts} x {name}", asyncio.run(rounds(texts, trees=trees)))
    config = replace(SMALL, layers=2, windows=(None, None), tied=False)
    with tempfile.TemporaryDirectory(prefix="pl") as temporary:
        folder = Path(temporary)
        write_ends(folder / "target", config, torch.device("cpu"))
        write_drafters(folder, folder / "target", config)
        for method in ("longspec", "dspark"):
            drafter = load(method, folder)
            for texts in SEQUENCES:
                report(f"{texts} x {method}", drafts(drafter, texts, config))


if __name__ == "__main__":
    main()
