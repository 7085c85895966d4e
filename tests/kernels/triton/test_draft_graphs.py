"""What a drafter's CUDA graphs replay, without a graph: whole drafts over tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter.models import (
    SAMPLINGS,
    VOCAB,
    made_up_states,
    recorded_kv,
    text_of,
    write_drafter,
    write_model,
)
from drafter.segments import passed
from stub_driver import StubDevice, StubDriver
from triton_cases import Waits

from paceline.bench.reference import write
from paceline.convert import load_decoder
from paceline.cuda.memory import close_unused
from paceline.cuda.triton.kernels import TritonKernels
from paceline.decoder import Decoder
from paceline.device import Device, DeviceLost
from paceline.drafter.growth import graphs
from paceline.drafter.growth.graphs import GraphGrowth
from paceline.drafter.growth.sequence import TreeGrowth
from paceline.drafter.kv import KvGone
from paceline.drafter.kv.cuda import CudaKv, CudaStates
from paceline.drafter.kv.mapped import CacheFile
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import Budget, GenerationInfo, Resources, Update
from paceline.kernels import devices
from paceline.verifier.kv.base import KvLayout, TapLayout, Taps
from paceline.verifier.kv.pool import PagedKv, PagePool

OnTriton = Callable[[Any], list[bool]]
METHODS: dict[str, dict[str, str]] = {
    "longspec": {"widths": "2,3", "depth": "2", "max_nodes": "4", "context": "16"},
    "eagle3": {"widths": "2,3", "depth": "2", "max_nodes": "4"},
    "mtp": {"widths": "2,3", "depth": "2", "max_nodes": "4"},
    "dspark": {"widths": "2,3", "max_nodes": "5"},
    "dspark, causal": {"widths": "2"},
}
BUDGETS = [Budget(8, 3), Budget(5, 2), Budget(9, 3)]
LENGTHS = (40, 23, 66)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("drafters")
    target = write_model(base / "target", "qwen3", 1)
    shapes: dict[str, dict[str, Any]] = {
        "longspec": {"window": 16, "draft_vocab_size": 60},
        "eagle3": {"fc_norm": True, "draft_vocab_size": 50},
        "mtp": {"window": 20},
        "dspark": {"window": 24, "markov_rank": 4, "layers": 2},
        "dspark, causal": {"confidence": False},
    }
    return {"target": target} | {
        name: write_drafter(name.partition(",")[0], base / name, target, **shape)
        for name, shape in shapes.items()
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
    drafter: Any, target: Decoder, sampling: str, count: int, pool: Pool | None = None,
    draft: Callable[..., Any] | None = None,
) -> list[Any]:  # fmt: skip
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
def on_triton(monkeypatch: pytest.MonkeyPatch) -> OnTriton:
    """Makes the CPU run what a GPU would, and a drafter use what its graphs would replay.

    Returns whether each draft was one of a graph.
    """

    def use(drafter: Any) -> list[bool]:
        monkeypatch.setitem(devices.LOADED, "cpu", TritonKernels())
        heads = getattr(drafter.layers, "heads", None)
        if (head := getattr(heads, "_markov", None)) is not None:
            heads._w2 = SimpleNamespace(weight=head.markov_w2.weight, packed=None)
        monkeypatch.setattr(graphs, "FED", (4,))
        slots = drafter.needs.kv_budget
        growth = GraphGrowth(drafter.layers, drafter.settings, drafter.method, slots)
        drafter.growth = TreeGrowth(growth)
        replay, replayed = growth.replay, []

        def recorded(*args: Any) -> Any:
            found = replay(*args)
            replayed.append(found is not None)
            return found

        monkeypatch.setattr(growth, "replay", recorded)
        monkeypatch.setattr(growth._capturing, "capture", without_waiting)
        return replayed

    return use


def without_waiting(draft: Callable[[], Any]) -> Callable[[], Any]:
    """What a graph would replay: its first run makes what all share, others read no number."""
    modes = chain([nullcontext()], repeat(Waits()))

    def run() -> Any:
        with next(modes):
            return draft()

    return run


def graphs_of(drafter: Any) -> Any:
    return drafter.growth.ways[0]


def drafter_of(name: str, folders: dict[str, Path], **more: str) -> Any:
    options = {"min_survival": "0.02", **METHODS[name], "target": str(folders["target"]), **more}
    return method_class(name.partition(",")[0]).load(folders[name], options, Resources())


@pytest.mark.parametrize(
    ("name", "sampling", "count", "paged"),
    [
        ("longspec", "filtered", 1, True),
        ("eagle3", "T=1", 2, True),
        ("mtp", "greedy", 1, False),
        ("dspark", "greedy", 3, True),
        ("dspark, causal", "filtered", 1, False),
    ],
)
def test_captured_drafts_are_those_of_the_cpu(
    name: str, sampling: str, count: int, paged: bool, folders: dict[str, Path], target: Decoder,
    on_triton: OnTriton,
) -> None:  # fmt: skip
    """Of padded batches, with texts that grow by 0 and 3 tokens, over copies and what a graph
    gathers from pages."""
    expected = trees_of(drafter_of(name, folders), target, sampling, count)
    drafter = drafter_of(name, folders)
    replayed, pool = on_triton(drafter), Pool(drafter)
    found = trees_of(drafter, target, sampling, count, pool if paged else None)
    pool.close()
    assert replayed == [True] * 2
    assert sum(map(len, expected)) >= 4 * count
    for tree, right in zip(found, expected, strict=True):
        assert (tree.tokens, tree.parents) == (right.tokens, right.parents)
        assert tree.confidences == pytest.approx(right.confidences, rel=1e-3)


@pytest.mark.parametrize("name", ["longspec", "dspark"])
def test_a_text_whose_cache_was_released_during_a_draft_is_dropped(
    name: str, folders: dict[str, Path], target: Decoder, on_triton: OnTriton,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its pages may be another text's by then. The others get their trees."""
    expected = trees_of(drafter_of(name, folders), target, "greedy", 3)
    drafter = drafter_of(name, folders)
    on_triton(drafter)
    pool, replay = Pool(drafter), graphs_of(drafter).replay

    def released(*args: Any) -> Any:
        found = replay(*args)
        pool.release(1)
        return found

    monkeypatch.setattr(graphs_of(drafter), "replay", released)
    found: list[Any] = []

    def draft(rounds: Any) -> Any:
        if not found:
            found.extend(drafter.draft_many(rounds))
        return []

    trees_of(drafter, target, "greedy", 3, pool, draft)
    pool.close()
    assert isinstance(found[1], KvGone)
    assert [found[0].tokens, found[2].tokens] == [expected[0].tokens, expected[2].tokens]


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
    folders: dict[str, Path], target: Decoder, on_triton: OnTriton,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Others keep theirs. The log has the first error, and how many failed."""
    name = "dspark, causal"
    expected = trees_of(drafter_of(name, folders), target, "greedy", 3)
    drafter = drafter_of(name, folders)
    replayed = on_triton(drafter)
    refuse_captures(drafter, monkeypatch, 4, 16)
    graphs_of(drafter).warm_up()
    assert "not permitted when stream is capturing" in caplog.text
    assert "6 could not be captured" in caplog.text
    for texts, has_graph in ((3, False), (2, True)):
        replayed.clear()
        found = trees_of(drafter, target, "greedy", texts)
        assert replayed == [has_graph] * 2
        wanted = expected[:texts] + expected[3 : 3 + texts]
        assert [tree.tokens for tree in found] == [tree.tokens for tree in wanted]


def test_without_any_graph_or_device(
    folders: dict[str, Path], on_triton: OnTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter none of whose graphs can be captured has none; one that loses the device by it is
    not loaded."""
    drafter = drafter_of("dspark, causal", folders)
    on_triton(drafter)
    refuse_captures(drafter, monkeypatch, *graphs.SEQUENCES)
    graphs_of(drafter).warm_up()
    assert not graphs_of(drafter).replays
    on_triton(drafter)
    refuse_captures(drafter, monkeypatch, 8)
    monkeypatch.setattr(Device, "lost", lambda device: DeviceLost("gone"))
    with pytest.raises(DeviceLost):
        graphs_of(drafter).warm_up()
