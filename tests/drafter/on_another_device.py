"""Drafters keep all their tensors on one device, and their trees equal those of the CPU.

Run by test_methods.py, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from another_device import another_device
from torch import Tensor

from paceline.bench.reference import ReferenceKernels
from paceline.convert import load_decoder
from paceline.decoder import Decoder
from paceline.device import device_of
from paceline.drafter.kv.reader import StateReader
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    GenerationInfo,
    LoadError,
    Resources,
    Update,
)
from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.dspark.heads import DSparkHeads
from paceline.kernels import devices, send
from paceline.tree import TokenTree

from .models import (
    SAMPLINGS,
    VOCAB,
    made_up_states,
    recorded_kv,
    text_of,
    write_drafter,
    write_model,
)
from .mtp_heads import write_target

METHODS = {
    "lm": {"widths": "3,2", "min_survival": "0"},
    "lm, budget": {"widths": "2,2", "context": "20", "kv_policy": "chunk_topk"},
    "longspec": {"widths": "3,2", "context": "16", "min_survival": "0"},
    "longspec, pruned": {"widths": "4,5", "depth": "4", "max_nodes": "9", "min_survival": "0.03"},
    "dspark": {"widths": "3,2", "min_survival": "0"},
    "dspark, heads": {"widths": "4,5", "max_nodes": "9", "min_survival": "0.01"},
    "dspark, chain": {"widths": "1", "min_survival": "0"},
    "dspark, no heads": {"widths": "3,5", "min_survival": "0.01"},
    "eagle3": {"widths": "3,2", "min_survival": "0"},
    "eagle3, pruned": {"widths": "4,5", "depth": "4", "max_nodes": "9", "min_survival": "0.03"},
    "mtp": {"widths": "4,5", "depth": "3", "max_nodes": "9", "min_survival": "0.03"},
    "mtp, three heads": {"widths": "3,2", "depth": "4", "min_survival": "0"},
    "selfspec": {"depth": "3", "context": "20", "min_survival": "0"},
}


SHAPES: dict[str, dict[str, Any]] = {
    "longspec": {"window": 16, "draft_vocab_size": 60},
    "dspark": {"window": 24, "markov_rank": 4},
    "dspark, heads": {"seed": 5, "markov_rank": 4, "confidence": True, "draft_vocab_size": 50},
    "dspark, chain": {"markov_rank": 4, "confidence": True},
    "dspark, no heads": {"confidence": False},
    "eagle3": {"fc_norm": True, "draft_vocab_size": 50},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("gpu")
    target = write_model(base / "target", "qwen3", 1)
    return {
        "lm": target,
        "selfspec": target,
        **{
            name: write_drafter(name.partition(",")[0], base / name, target, **shape)
            for name, shape in SHAPES.items()
        },
        "mtp": write_target(base / "mtp", "MiMo"),
        "mtp, three heads": write_target(base / "heads of mtp", "DeepSeek, three heads"),
    }


@pytest.fixture(scope="module")
def target(folders: dict[str, Path]) -> Decoder:
    return load_decoder(folders["lm"])


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the plain PyTorch backend on both devices, in this thread."""
    for kind in ("cpu", "other"):
        monkeypatch.setitem(devices.LOADED, kind, ReferenceKernels())
    for module in ("lm", "target_drafter", "selfspec", "mtp.drafter"):
        monkeypatch.setattr(f"paceline.drafter.methods.{module}.load_model", _here)


def _here(
    folder: Path, resources: Resources, load: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    return load(*args, **more)


def drafter_of(name: str, folders: dict[str, Path], device: str, **more: str) -> Drafter:
    method = name.partition(",")[0]
    options = {**METHODS[name], **more}
    if method in ("longspec", "dspark", "eagle3"):
        options["target"] = str(folders["lm"])
    folder = folders.get(name, folders[method])
    with pytest.MonkeyPatch.context() as patch:
        if name == "dspark, heads":
            patch.setattr(DSparkHeads, "__init__", _with_best_tokens)
        return method_class(method).load(folder, options, Resources(device=device_of(device)))


def _with_best_tokens(
    heads: DSparkHeads, config: DSparkConfig, *args: Any, make: Any = DSparkHeads.__init__
) -> None:
    """Makes heads that choose among 30 best tokens, which only published folders name."""
    make(heads, replace(config, markov_best=30), *args)


class Moved(StateReader):
    """Keys and values, or hidden states, on a device."""

    def __init__(self, kv: Any, device: str) -> None:
        self._kv, self._device = kv, device

    @property
    def committed(self) -> int:
        committed: int = self._kv.committed
        return committed

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        first, states = self._kv.read(begin, end)
        return first, send(states, self._device)

    def refresh(self, below: int, budget: int) -> int:
        return self._kv.refresh(below, budget)

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        found = self._kv.parts(layer)
        return [(send(keys, self._device), send(values, self._device)) for keys, values in found]

    def pages(self, layer: int) -> None:
        """They do not lie in pages."""

    def check(self) -> None:
        """It always exists."""

    def close(self) -> None:
        """There is nothing to release."""


def trees(drafter: Drafter, target: Decoder, sampling: str, kv_device: str) -> list[TokenTree]:
    """Trees of two texts together, over three rounds."""
    texts, lengths = [text_of(60, 1), text_of(40, 2)], (40, 23)
    budgets = [Budget(8, 3), Budget(7, 4)]
    sequences = []
    for text, length in zip(texts, lengths, strict=True):
        generation = GenerationInfo(text[:length], length, VOCAB, SAMPLINGS[sampling])
        if drafter.needs.hidden_state_layers:
            states: Any = Moved(made_up_states(drafter.shape, length + 8), kv_device)
            generation = replace(generation, states=states)
        elif drafter.needs.kv_layers:
            kv = Moved(recorded_kv(target, text, length + 8), kv_device)
            generation = replace(generation, kv=kv)
        sequences.append(drafter.start(generation))
    found: list[TokenTree] = []
    for begin in range(3):
        for sequence, text, length in zip(sequences, texts, lengths, strict=True):
            if begin:
                sequence.extend(Update(text[length + begin - 1 : length + begin]))
            sequence.warm(30)
        found += drafter.draft_many(list(zip(sequences, budgets, strict=True)))
    for sequence in sequences:
        sequence.close()
    return found


@pytest.mark.parametrize("sampling", ["greedy", "T=1", "filtered", "penalised"])
@pytest.mark.parametrize("name", METHODS)
def test_trees_are_those_of_the_cpu(
    name: str, sampling: str, folders: dict[str, Path], target: Decoder
) -> None:
    """With the target's keys and values, or hidden states, on either device."""
    expected = trees(drafter_of(name, folders, "cpu"), target, sampling, "cpu")
    assert sum(len(tree) for tree in expected) > 12
    with another_device():
        for kv_device in ("cpu", "other:0"):
            drafter = drafter_of(name, folders, "other:0")  # without what it learned from texts
            found = trees(drafter, target, sampling, kv_device)
            for tree, right in zip(found, expected, strict=True):
                assert (tree.tokens, tree.parents) == (right.tokens, right.parents)
                assert tree.confidences == pytest.approx(right.confidences, rel=1e-4)


def test_shared_weights_need_the_cpu(folders: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match="share_weights=auto"):
        drafter_of("selfspec", folders, "other:0", share_weights="always")
