"""What a drafter's CUDA graphs replay, without a graph: whole drafts over tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

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
)

from paceline.decoder import Decoder
from paceline.drafter.methods import draft_graphs, method_class
from paceline.drafter.methods.base import Budget, GenerationInfo, Resources, Update
from paceline.kernels import attention
from paceline.tree import TokenTree

METHODS: dict[str, dict[str, str]] = {
    "longspec": {"widths": "4,5", "depth": "3", "max_nodes": "9", "context": "16"},
    "eagle3": {"widths": "4,5", "depth": "3", "max_nodes": "9"},
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
        "dspark": write_dspark(base / "dspark", target, markov_head="rnn", **block),
        "dspark, causal": write_dspark(base / "no_head", target, confidence=False),
    }


@pytest.fixture(scope="module")
def target(folders: dict[str, Path]) -> Decoder:
    return Decoder.load(folders["target"])


def trees_of(drafter: Any, target: Decoder, sampling: str, count: int) -> list[TokenTree]:
    """Trees of texts drafted for together, over two rounds."""
    sequences = []
    texts = [text_of(80, seed) for seed in range(count)]
    for text, length in zip(texts, LENGTHS, strict=False):
        data: dict[str, Any] = {}
        if drafter.needs.hidden_state_layers:
            data["states"] = made_up_states(drafter.shape, length + 12)
        else:
            data["kv"] = recorded_kv(target, text, length + 12)
        info = GenerationInfo(text[:length], length, VOCAB, SAMPLINGS[sampling], **data)
        sequences.append(drafter.start(info))
    found: list[TokenTree] = []
    for grown in (0, 3):
        for sequence, text, length in zip(sequences, texts, LENGTHS, strict=False):
            sequence.extend(Update(text[length : length + grown]))
            if not grown:
                sequence.warm(100)
        found += drafter.draft_many(list(zip(sequences, BUDGETS, strict=False)))
    for sequence in sequences:
        sequence.close()
    return found


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[bool]]:
    """Makes the CPU run what a GPU would, and a drafter use what its graphs would replay.

    Returns whether each draft was one of a graph.
    """

    def use(drafter: Any) -> list[bool]:
        from paceline.kernels._triton.backend import TritonBackend, TritonRows

        monkeypatch.setitem(attention._LOADED, "cpu", TritonBackend())
        monkeypatch.setattr("paceline.kernels.executor.row_kernels", lambda device: TritonRows())
        drafter.native, drafter.grows_on_device = None, True
        drafter.drafted_on_device = drafter.drafted_tokens
        heads = getattr(drafter.layers, "heads", None)
        if (head := getattr(heads, "_markov", None)) is not None:
            heads._w2 = SimpleNamespace(weight=head.markov_w2.weight, packed=None)
        monkeypatch.setattr(draft_graphs, "FED", (4,))
        drafter.use_graphs()
        run, replayed = drafter.graphs.run, []

        def recorded(*args: Any) -> Any:
            found = run(*args)
            replayed.append(found is not None)
            return found

        monkeypatch.setattr(drafter.graphs, "run", recorded)
        return replayed

    return use


def drafter_of(name: str, folders: dict[str, Path]) -> Any:
    options = {"min_survival": "0.02", **METHODS[name], "target": str(folders["target"])}
    return method_class(name.partition(",")[0]).load(folders[name], options, Resources())


@pytest.mark.parametrize(
    ("name", "sampling", "count"),
    [
        ("longspec", "filtered", 2),
        ("eagle3", "T=1", 2),
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
    (graph,) = drafter.graphs._graphs.values()
    with torch.inference_mode(), Operations() as operations:
        graph.clear()
        operations.names.clear()
        graph.draft()
    assert "stack" in operations.names
    assert not operations.names & {"sort", "topk", "_log_softmax", "_softmax"}
    assert not operations.names & {"lift_fresh", "_local_scalar_dense", "nonzero", "masked_select"}


def test_a_drafter_whose_drafts_cannot_be_captured_has_no_graphs(
    folders: dict[str, Path],
    on_triton: Callable[[Any], list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    drafter = drafter_of("dspark, causal", folders)
    on_triton(drafter)
    monkeypatch.setattr(drafter.graphs._capturing, "capture", refuse)
    drafter.warm_up()
    assert drafter.graphs is None


class Operations(TorchDispatchMode):
    """Names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
