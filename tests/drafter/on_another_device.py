"""Drafters keep all their tensors on one device, and their trees equal those of the CPU.

Run by test_methods.py, in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.bench.reference import ReferenceKernels
from paceline.convert import load_decoder
from paceline.decoder import Decoder
from paceline.device import device_of
from paceline.drafter.growth import ranking
from paceline.drafter.growth.ranking import Ranker
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
from paceline.drafter.methods.layers import linear
from paceline.drafter.methods.target_drafter import weight_bits
from paceline.kernels import devices, send
from paceline.kernels.quantised import quantise
from paceline.kernels.rotated import RotatedMatrix
from paceline.text import sampling_rules
from paceline.tree import TokenTree

sys.path.insert(0, str(Path(__file__).parent.parent))

from another_device import TRANSFERS, OnDevice, another_device

from .models import (
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
from .mtp_heads import write_target

PERTURBED = ranking.perturbed_logits

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("gpu")
    target = write_model(base / "target", "qwen3", 1)
    return {
        "lm": target,
        "selfspec": target,
        "longspec": write_longspec(base / "longspec", target, window=16, draft_vocab_size=60),
        "dspark": write_dspark(base / "dspark", target, window=24, markov_rank=4),
        "dspark, heads": write_dspark(
            base / "heads", target, 5, markov_rank=4, confidence=True, draft_vocab_size=50
        ),
        "dspark, chain": write_dspark(base / "chain", target, markov_rank=4, confidence=True),
        "dspark, no heads": write_dspark(base / "block", target, confidence=False),
        "eagle3": write_eagle3(base / "eagle3", target, fc_norm=True, draft_vocab_size=50),
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
        TRANSFERS.clear()
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


@pytest.mark.parametrize("sampling", ["greedy", "T=1", "filtered"])
@pytest.mark.parametrize("name", [name for name in METHODS if name[:2] in ("lo", "ds", "ea", "mt")])
def test_the_host_waits_once_for_the_trees_of_all_texts(
    name: str, sampling: str, folders: dict[str, Path], target: Decoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever their depth."""
    monkeypatch.setattr(ranking, "perturbed_logits", perturbed_on_device)
    with another_device():
        trees(drafter_of(name, folders, "other:0"), target, sampling, "other:0")
    assert (TRANSFERS["host"], TRANSFERS["waits"]) == (1, 1)


def perturbed_on_device(logits: Tensor, params: Any, positions: Any, ids: Any) -> Tensor:
    """As the GPU's kernels do it: tensors stay where they are."""
    assert isinstance(logits, OnDevice)
    inner = None if ids is None else ids.inner
    return OnDevice(PERTURBED(logits.inner, params, positions, inner))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_8_bits_are_rounded_on_the_device(dtype: torch.dtype) -> None:
    """Those of 16 bits over rotated inputs, others in blocks."""
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(3, 64).to(dtype)
    rotated = dtype.itemsize == 2
    right = (
        RotatedMatrix.of(weight).multiply(x, None)
        if rotated
        else x @ quantise(weight, 8).dequantise().T
    )
    with another_device():
        layer = linear([weight.to("other")], bits=8)
        assert (layer.packed, layer.exact) == (None, rotated)
        found = layer(x.to("other"))
        assert isinstance(found, OnDevice)
    torch.testing.assert_close(found.inner, right)


@pytest.mark.parametrize(
    ("weights", "device", "bits"),
    [("auto", "cpu", 0), ("auto", "other:0", 0), ("int8", "other:0", 8), ("int4", "cpu", 4)],
)
def test_drafters_keep_their_type_unless_it_is_told(
    weights: str, device: str, bits: int, folders: dict[str, Path]
) -> None:
    assert weight_bits(weights, folders["longspec"], device_of(device)) == bits


@pytest.mark.parametrize("sampling", ["T=1", "filtered"])
def test_candidates_are_selected_on_the_device(sampling: str) -> None:
    """Those of the CPU if it adds noise to all tokens; no whole rows of logits are copied."""
    params = sampling_rules(SAMPLINGS[sampling])
    logits = torch.randn(3, 600)
    drafted = torch.arange(600) * 2

    def ranked(logits: Tensor) -> tuple[Tensor, Tensor]:
        ranker = Ranker(
            params, prompt=[1], output=[], vocab_size=1200, candidates=64, drafted=drafted,
            drafted_on_device=drafted.to(logits.device),
        )  # fmt: skip
        return ranker.rank(logits, 7, 4)

    right = ranked(logits)
    with another_device():
        there = logits.to("other")
        found = ranked(there)
        assert isinstance(there, OnDevice)
        assert all(isinstance(each, OnDevice) for each in found)
        with pytest.raises(AssertionError, match="both devices"):
            there + logits
    assert torch.equal(found[0].inner, right[0])
    torch.testing.assert_close(found[1].inner, right[1])


def test_shared_weights_need_the_cpu(folders: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match="share_weights=auto"):
        drafter_of("selfspec", folders, "other:0", share_weights="always")
