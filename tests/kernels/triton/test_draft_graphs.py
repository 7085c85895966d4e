"""What a drafter's CUDA graphs replay, without a graph: whole drafts over tables."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import Launches
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.bench.reference import write
from paceline.convert import load_decoder
from paceline.cuda.triton.kernels import TritonKernels

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "kv"))

from drafter.models import (
    SAMPLINGS,
    VOCAB,
    made_up_states,
    recorded_kv,
    text_of,
    write_dspark,
    write_eagle3,
    write_longspec,
    write_model,
    write_mtp,
)
from drafter.segments import passed
from stub_driver import StubDevice, StubDriver

from paceline.cuda.memory import close_unused
from paceline.decoder import Decoder
from paceline.device import Device, DeviceLost
from paceline.drafter.growth import graphs
from paceline.drafter.growth.graphs import DraftGraphs
from paceline.drafter.growth.levels import LevelGrowth
from paceline.drafter.growth.sequence import TreeGrowth
from paceline.drafter.kv import KvGone
from paceline.drafter.kv.cuda import CudaKv, CudaStates
from paceline.drafter.kv.mapped import CacheFile
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import Budget, GenerationInfo, Resources, Update
from paceline.kernels import devices
from paceline.verifier.kv.base import KvLayout, TapLayout, Taps
from paceline.verifier.kv.pool import PagedKv, PagePool

METHODS: dict[str, dict[str, str]] = {
    "longspec": {"widths": "4,5", "depth": "3", "max_nodes": "9", "context": "16"},
    "eagle3": {"widths": "4,5", "depth": "3", "max_nodes": "9"},
    "mtp": {"widths": "4,5", "depth": "3", "max_nodes": "9"},
    "dspark": {"widths": "4,5", "max_nodes": "9"},
    "dspark, causal": {"widths": "2"},
}
BUDGETS = [Budget(8, 3), Budget(5, 2), Budget(9, 3)]
LENGTHS = (40, 23, 66)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("drafters")
    target = write_model(base / "target", "qwen3", 1)
    block: dict[str, Any] = {"window": 24, "markov_rank": 4, "layers": 2}
    return {
        "target": target,
        "longspec": write_longspec(base / "longspec", target, window=16, draft_vocab_size=60),
        "eagle3": write_eagle3(base / "eagle3", target, fc_norm=True, draft_vocab_size=50),
        "mtp": write_mtp(base / "mtp", target, window=20),
        "dspark": write_dspark(base / "dspark", target, **block),
        "dspark, causal": write_dspark(base / "no_head", target, confidence=False),
    }


@pytest.fixture(scope="module")
def target(folders: dict[str, Path]) -> Decoder:
    return load_decoder(folders["target"])


class Pool:
    """The target's KV, or its hidden states, in pages of a GPU that is a piece of main memory."""

    def __init__(self, drafter: Any) -> None:
        config = drafter.layers.config
        self.driver = StubDriver()
        self.device = StubDevice(self.driver)
        self.taps = drafter.needs.hidden_state_layers
        self.layout = KvLayout(
            layers=3, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=torch.float32,
            hidden=config.hidden,
        )  # fmt: skip
        self.pages = PagePool(
            self.layout, self.device, kv_bytes=64 * 256 * self.layout.token_bytes,
            max_sequences=8, max_context=512,
        )  # fmt: skip
        self.caches: list[PagedKv] = []
        self.readers: list[CudaKv | CudaStates] = []

    def cache(self, taps: TapLayout | None = None) -> PagedKv:
        cache = PagedKv(self.pages, 512, taps)
        cache.header.open(7)
        cache.reserve(300)
        self.caches.append(cache)
        return cache

    def kv(self, recorded: Any, layer: int) -> CudaKv:
        cache, planes = self.cache(), torch.stack(recorded.layer(layer))
        for index in range(3):
            for plane, rows in zip(cache.layer(index), planes, strict=True):
                write(plane, 0, rows)
        cache.publish(recorded.committed)
        reader = CudaKv(CacheFile(*passed(cache)), (layer,), self.device)
        self.readers.append(reader)
        return reader

    def states(self, recorded: Any) -> CudaStates:
        cache = self.cache(TapLayout.of(Taps(self.taps, 0), self.layout, 512))
        rows = recorded.states.unflatten(1, (len(self.taps), -1)).unbind(1)
        assert cache.taps is not None
        states = dict(zip(self.taps, rows, strict=True))
        cache.taps.record(0, states, slice(0, recorded.committed))
        cache.publish(recorded.committed)
        reader = CudaStates(CacheFile(*passed(cache)), self.taps, 0, self.device)
        self.readers.append(reader)
        return reader

    def release(self, number: int) -> None:
        """Releases a text's cache, whose pages are reused."""
        self.caches[number].close()

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        for cache in self.caches:
            cache.close()
        close_unused()
        self.pages.close()


def trees_of(
    drafter: Any,
    target: Decoder,
    sampling: str,
    count: int,
    pool: Pool | None = None,
    draft: Callable[..., Any] | None = None,
) -> list[Any]:
    """Trees of texts drafted for together, over two rounds; with a pool it has what they read."""
    sequences = []
    draft = draft or drafter.draft_many
    texts = [text_of(80, seed) for seed in range(count)]
    for text, length in zip(texts, LENGTHS, strict=False):
        data: dict[str, Any] = {}
        if drafter.needs.hidden_state_layers:
            data["states"] = made_up_states(drafter.shape, length + 12)
            if pool is not None:
                data["states"] = pool.states(data["states"])
        else:
            data["kv"] = recorded_kv(target, text, length + 12)
            if pool is not None:
                data["kv"] = pool.kv(data["kv"], drafter.layers.config.target_layer)
        info = GenerationInfo(text[:length], length, VOCAB, SAMPLINGS[sampling], **data)
        sequences.append(drafter.start(info))
    found: list[Any] = []
    for grown in (0, 3):
        for sequence, text, length in zip(sequences, texts, LENGTHS, strict=False):
            sequence.extend(Update(text[length : length + grown]))
            if not grown:
                sequence.warm(100)
        found += draft(list(zip(sequences, BUDGETS, strict=False)))
    for sequence in sequences:
        sequence.close()
    return found


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[bool]]:
    """Makes the CPU run what a GPU would, and a drafter use what its graphs would replay.

    Returns whether each draft was one of a graph.
    """

    def use(drafter: Any) -> list[bool]:
        monkeypatch.setitem(devices.LOADED, "cpu", TritonKernels())
        heads = getattr(drafter.layers, "heads", None)
        if (head := getattr(heads, "_markov", None)) is not None:
            heads._w2 = SimpleNamespace(weight=head.markov_w2.weight, packed=None)
        monkeypatch.setattr(graphs, "FED", (4,))
        captured = graphs_without_gpu(drafter)
        growth = LevelGrowth(drafter.layers, drafter.settings, captured)
        drafter.growth = TreeGrowth(growth)
        run, replayed = captured.run, []

        def recorded(*args: Any) -> Any:
            found = run(*args)
            replayed.append(found is not None)
            return found

        monkeypatch.setattr(captured, "run", recorded)
        return replayed

    return use


def graphs_without_gpu(drafter: Any) -> DraftGraphs:
    slots = drafter.needs.kv_budget
    return DraftGraphs(drafter.layers, drafter.settings, drafter.method, slots)


def graphs_of(drafter: Any) -> Any:
    return drafter.growth.ways[0].graphs


def drafter_of(name: str, folders: dict[str, Path], **more: str) -> Any:
    options = {"min_survival": "0.02", **METHODS[name], "target": str(folders["target"]), **more}
    return method_class(name.partition(",")[0]).load(folders[name], options, Resources())


@pytest.mark.parametrize(
    ("name", "sampling", "count"),
    [
        ("longspec", "filtered", 2),
        ("eagle3", "T=1", 2),
        ("mtp", "T=1", 2),
        ("dspark", "greedy", 3),
        ("dspark, causal", "filtered", 1),
    ],
)
def test_captured_drafts_are_those_of_the_cpu(
    name: str,
    sampling: str,
    count: int,
    folders: dict[str, Path],
    target: Decoder,
    on_triton: Callable[[Any], list[bool]],
) -> None:
    """Of padded batches, with texts that grow by 0 and 3 tokens. What would be captured makes no
    tensor of the host's numbers and reads none."""
    expected = trees_of(drafter_of(name, folders), target, sampling, count)
    drafter = drafter_of(name, folders)
    replayed = on_triton(drafter)
    found = trees_of(drafter, target, sampling, count)
    assert replayed == [True] * 2
    assert sum(map(len, expected)) > 4 * count
    for tree, right in zip(found, expected, strict=True):
        assert (tree.tokens, tree.parents) == (right.tokens, right.parents)
        assert tree.confidences == pytest.approx(right.confidences, rel=1e-3)
    (graph,) = graphs_of(drafter)._graphs.values()
    with torch.inference_mode(), Operations() as operations:
        graph.clear()
        operations.found.clear()
        graph.draft()
    assert "stack" in operations.names
    assert not operations.names & {"sort", "topk", "_log_softmax", "_softmax"}
    assert not operations.names & {"lift_fresh", "_local_scalar_dense", "nonzero", "masked_select"}


@pytest.mark.parametrize("name", METHODS)
def test_a_draft_is_a_copy_a_replay_and_a_copy_for_any_number_of_texts(
    name: str,
    folders: dict[str, Path],
    target: Decoder,
    on_triton: Callable[[Any], list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph gathers what lies in pages. Beside it, the host asks the device for nothing, and
    waits once; the trees are those of copies."""
    expected = trees_of(drafter_of(name, folders), target, "greedy", 3)
    waits: list[None] = []
    monkeypatch.setattr(Device, "wait", lambda device: waits.append(None))
    for count in (1, 3) if name == "dspark" else (3,):
        drafter = drafter_of(name, folders)
        replayed, asked, pool = on_triton(drafter), Operations(), Pool(drafter)

        def draft(rounds: Any, drafter: Any = drafter, asked: Operations = asked) -> Any:
            graph = graphs_of(drafter).graph({1: 1, 3: 4}[len(rounds)], 4, "none")
            graph.run = asked.paused(graph.draft)
            waits.clear()
            asked.found.clear()
            with asked:
                found = drafter.draft_many(rounds)
            assert [name for name in asked.found if name not in VIEWS] == ["copy_", "copy_"]
            assert len(waits) == 1
            return found

        found = trees_of(drafter, target, "greedy", count, pool, draft)
        pool.close()
        assert replayed == [True, True]
        rounds = expected[:count] + expected[3 : 3 + count]
        for tree, right in zip(found, rounds, strict=True):
            assert (tree.tokens, tree.parents) == (right.tokens, right.parents)


@pytest.mark.parametrize("name", ["longspec", "dspark"])
def test_a_graph_has_as_many_launches_for_any_number_of_texts(
    name: str, folders: dict[str, Path], on_triton: Callable[[Any], list[bool]]
) -> None:
    """By kind: what a draft takes on a GPU is mostly their number. Tokens and rows of one tree are
    dense, those of several are copied."""
    drafter = drafter_of(name, folders, depth="3")
    on_triton(drafter)
    for noise in ("none", "filters"):
        found = []
        for sequences in (1, 4):
            graph = graphs_of(drafter).graph(sequences, 4, noise)
            with torch.inference_mode(), Launches():
                graph.draft()  # makes what all drafts share
            with torch.inference_mode(), Launches() as launched:
                graph.draft()
            found.append(Counter(name for name in launched.names if name != "flatten"))
        assert found[0] == found[1]
        assert found[0]["grow_level"] == found[0]["best_of_chunks"] == 3


@pytest.mark.parametrize("name", ["longspec", "eagle3", "dspark"])
def test_a_text_whose_cache_was_released_during_a_draft_is_dropped(
    name: str,
    folders: dict[str, Path],
    target: Decoder,
    on_triton: Callable[[Any], list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pages may be another text's by then. The others get their trees."""
    expected = trees_of(drafter_of(name, folders), target, "greedy", 3)
    drafter = drafter_of(name, folders)
    on_triton(drafter)
    pool, run = Pool(drafter), graphs_of(drafter).run

    def released(*args: Any) -> Any:
        found = run(*args)
        pool.release(1)
        return found

    monkeypatch.setattr(graphs_of(drafter), "run", released)
    found: list[Any] = []

    def draft(rounds: Any) -> Any:
        if not found:
            found.extend(drafter.draft_many(rounds))
        return []

    trees_of(drafter, target, "greedy", 3, pool, draft)
    pool.close()
    assert isinstance(found[1], KvGone)
    assert [found[0].tokens, found[2].tokens] == [expected[0].tokens, expected[2].tokens]


@pytest.mark.parametrize(("bits", "count"), [(0, 3), (8, 15)])
def test_a_start_captures_a_graph_for_each_size_and_choice(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, bits: int, count: int
) -> None:
    """Each takes time of a start: few enough. Tiles of products of quantised weights depend on the
    number of rows: they are compiled for each size, others for the largest of each choice."""
    drafter = drafter_of("dspark, causal", folders)
    captured, compiled = graphs_without_gpu(drafter), list[Any]()
    monkeypatch.setattr(captured._capturing, "compile", compiled.extend)
    monkeypatch.setattr(drafter.layers, "bits", bits)
    captured.warm_up()
    assert (len(captured), len(compiled)) == (36, count)


def refuse_captures(drafter: Any, monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """Makes graphs of some numbers of sequences fail."""
    capturing = graphs_of(drafter)._capturing
    capture = capturing.capture

    def refuse(draft: Any) -> Any:
        if draft.__self__._sequences in sizes:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(draft)

    monkeypatch.setattr(capturing, "capture", refuse)


def test_texts_whose_graph_cannot_be_captured_are_drafted_for_without_it(
    folders: dict[str, Path],
    target: Decoder,
    on_triton: Callable[[Any], list[bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others keep theirs. The log has the first error, and how many failed."""
    name = "dspark, causal"
    expected = trees_of(drafter_of(name, folders), target, "greedy", 3)
    drafter = drafter_of(name, folders)
    replayed = on_triton(drafter)
    refuse_captures(drafter, monkeypatch, 4, 16)
    drafter.growth.ways[0].warm_up()
    first, count = caplog.messages
    assert first.startswith("no CUDA graph of 16 texts with 4 new positions (noise: none)")
    assert "not permitted when stream is capturing" in first
    assert count == "CUDA graphs of drafts of dspark: 12; 6 could not be captured"
    assert caplog.text.count("Traceback") == 1
    for texts, has_graph in ((3, False), (2, True)):
        replayed.clear()
        found = trees_of(drafter, target, "greedy", texts)
        assert replayed == [has_graph] * 2
        wanted = expected[:texts] + expected[3 : 3 + texts]
        assert [tree.tokens for tree in found] == [tree.tokens for tree in wanted]


def test_without_any_graph_or_device(
    folders: dict[str, Path],
    on_triton: Callable[[Any], list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter none of whose graphs can be captured has none; one that loses the device by it is
    not loaded."""
    drafter = drafter_of("dspark, causal", folders)
    on_triton(drafter)
    refuse_captures(drafter, monkeypatch, *graphs.SEQUENCES)
    (growth,) = drafter.growth.ways
    growth.warm_up()
    assert growth.graphs is None
    on_triton(drafter)
    refuse_captures(drafter, monkeypatch, 8)
    monkeypatch.setattr(Device, "lost", lambda device: DeviceLost("gone"))
    with pytest.raises(DeviceLost):
        drafter.growth.ways[0].warm_up()


# Operations that launch and copy nothing: views, and tensors of the host's own numbers.
VIEWS = ("select", "slice", "detach", "detach_", "lift_fresh", "to", "resolve_conj", "resolve_neg")


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._paused = False

    @property
    def names(self) -> set[str]:
        return set(self.found)

    def paused(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """A function whose operations are not noted, as those of a graph."""

        def replay() -> Any:
            self._paused = True
            try:
                return run()
            finally:
                self._paused = False

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused:
            self.found.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
