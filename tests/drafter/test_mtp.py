"""Heads for multi-token prediction of every layout: trees of a dense reference, bad folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cases import extend, save_model
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file

from paceline.cli import shipped
from paceline.cli.services import load_arguments
from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache
from paceline.drafter.inspection import inspect_drafter
from paceline.drafter.methods.base import Budget, LoadError, Update
from paceline.kernels import QueryBlock, plan_trees
from paceline.train.acceptance import RecordedStates

from . import models
from .models import GREEDY, SAMPLINGS, change_config, check_tree, made_up_states, text_of
from .mtp_heads import LAYOUTS, DenseMtp, write_target


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_target(tmp_path_factory.mktemp("target"), name) for name in LAYOUTS}


@pytest.mark.parametrize(
    ("name", "widths"),
    [*((name, (3, 4, 2)) for name in LAYOUTS), ("DeepSeek, three heads", (1, 1, 1, 1))],
)
def test_trees_are_those_of_a_dense_reference(
    name: str, widths: tuple[int, ...], targets: dict[str, Path]
) -> None:
    """Of texts that were processed before the round, and read within it."""
    options = {"widths": ",".join(map(str, widths)), "min_survival": 0}
    drafter = models.load("mtp", None, targets[name], **options)
    dense = DenseMtp(targets[name], name)
    for length, sampling in ((2, GREEDY), (40, GREEDY), (9, SAMPLINGS["T=1"])):
        text = text_of(length + 5, length)
        states = made_up_states(drafter.shape, len(text) - 1)
        sequence = models.start(drafter, text[:length], states, sampling)
        for begin in (length, length + 3):
            states.committed = begin - 1
            tree = sequence.draft(Budget(9, 4))
            check_tree(tree, dense.tree(text[:begin], states, sampling, widths))
            sequence.extend(Update(text[begin : begin + 3]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_text_with_the_target_s_heads_is_that_without(
    name: str, targets: dict[str, Path]
) -> None:
    """The target loads without its heads, and they read its states."""
    folder, prompt, count = targets[name], text_of(30), 20
    decoder, cache = load_decoder(folder), LocalCache(load_decoder(folder).config)
    text = list(prompt)
    logits = extend(decoder, cache, torch.tensor(text))
    while len(text) < len(prompt) + count:
        text.append(int(logits[-1].argmax()))
        logits = extend(decoder, cache, torch.tensor(text[-1:]))
    drafter = models.load("mtp", None, folder, weights="int8")
    states, found = RecordedStates(states_of(decoder, text), 0), list(prompt)
    cache = LocalCache(decoder.config)
    extend(decoder, cache, torch.tensor(found[:-1]))
    sequence = models.start(drafter, found, states)
    while len(found) < len(text):
        states.committed = len(found) - 1
        found += models.verify(decoder, cache, sequence, found[-1], Budget(6, 3))
    assert found[: len(text)] == text


def states_of(decoder: Decoder, text: list[int]) -> torch.Tensor:
    """Outputs of the target's last layer, ``[n, hidden]``."""
    cache = LocalCache(decoder.config)
    cache.reserve(len(text))
    plan = plan_trees([QueryBlock(0, 0, None, len(text))])
    last = decoder.config.layers - 1
    found = decoder.forward(torch.tensor(text), plan, [cache], logit_rows=None, taps=[last])
    return found.taps[0]


def test_heads_beside_a_target(tmp_path: Path, targets: dict[str, Path]) -> None:
    """A folder of heads alone drafts as they do in the target's own; another target is refused."""
    target = targets["DeepSeek, three heads"]
    described = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    first = f"model.layers.{described['num_hidden_layers']}."
    kept = {n: t for n, t in weights.items() if n.startswith(first) or n == "model.norm.weight"}
    described["num_nextn_predict_layers"] = 1
    beside = models.write_folder(tmp_path / "heads", described, kept)
    own = shutil.copytree(target, tmp_path / "own")
    change(own, lambda names: [n for n in names if is_later_head(n, described)])
    change_config(own, num_nextn_predict_layers=1)
    trees = []
    for folder, source in ((beside, own), (None, own), (own, None)):
        drafter = models.load("mtp", folder, source, widths="3,3")
        states = made_up_states(drafter.shape, 29)
        trees.append(models.start(drafter, text_of(30), states).draft(Budget(6, 2)))
    assert trees[0] == trees[1] == trees[2]
    with pytest.raises(LoadError, match="for a target with hidden 96"):
        models.load("mtp", beside, models.write_model(tmp_path / "other"))
    with pytest.raises(LoadError, match="give the target it was trained for"):
        models.load("mtp", own, targets["MiMo"])


def is_later_head(name: str, described: dict[str, Any]) -> bool:
    parts = name.split(".")
    return parts[1] == "layers" and int(parts[2]) > described["num_hidden_layers"]


def change(folder: Path, removed: Callable[[list[str]], list[str]], **added: torch.Tensor) -> None:
    """Removes tensors of a folder, and adds others."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in removed(list(weights)):
        del weights[name]
    save_file({**weights, **added}, file, metadata={"format": "pt"})


def nothing(_: list[str]) -> list[str]:
    return []


def starting(*beginnings: str) -> Callable[[list[str]], list[str]]:
    return lambda names: [name for name in names if name.startswith(beginnings)]


@pytest.mark.parametrize(
    ("name", "removed", "added", "fields", "message"),
    [
        ("Qwen3.5", starting("mtp."), {}, {}, "has no MTP heads: expected tensors mtp"),
        ("Qwen3.5", starting("mtp.fc"), {}, {}, "lacks the tensor 'mtp.fc.weight'"),
        ("Qwen3.5", starting("mtp.layers.0.mlp.up"), {}, {}, "lacks .*'mtp.layers.0.mlp.up_proj"),
        ("Qwen3.5", nothing, {"mtp.fc.weight": (96, 96)}, {}, r"\(96, 96\), expected \(96, 192\)"),
        ("Qwen3.5", nothing, {"mtp.embed_tokens.weight": (96, 96)}, {}, "mtp.embed_tokens.weight"),
        (
            "Qwen3.5", nothing, {"mtp.layers.0.self_attn.k_proj.bias": (64,)}, {},
            "no MTP head of a model of type 'qwen3_5_text' has",
        ),
        ("Qwen3.5", nothing, {}, {"num_nextn_predict_layers": 2}, "names 2 MTP heads.* of 1"),
        ("Qwen3.5, two heads", starting("mtp.layers.1"), {}, {}, "names 2 MTP heads.* of 1"),
        (
            "DeepSeek, three heads", starting("model.layers.3.eh_proj"), {}, {},
            "lacks the tensor 'model.layers.3.eh_proj.weight'",
        ),
        ("DeepSeek, GLM-4", starting("model.norm"), {}, {}, "lacks .*'model.norm.weight'"),
        (
            "DeepSeek, own LM head", nothing,
            {"model.layers.2.shared_head.head.weight": (95, 96)}, {}, r"expected \(96, 96\)",
        ),
        (
            "DeepSeek, experts", nothing,
            {"model.layers.2.mlp.shared_experts.up_proj.weight": (64, 96)}, {}, "shared_expert.up",
        ),
        (
            "MiMo", nothing, {"model.mtp_layers.0.self_attn.q_proj.weight": (96, 64)}, {},
            "q_proj.weight' of .* has shape",
        ),
        ("MiMo", nothing, {"model.mtp_layers.0.extra.weight": (4,)}, {}, "extra.weight"),
    ],
)  # fmt: skip
def test_bad_heads_are_named(
    name: str,
    removed: Callable[[list[str]], list[str]],
    added: dict[str, tuple[int, ...]],
    fields: dict[str, Any],
    message: str,
    tmp_path: Path,
    targets: dict[str, Path],
) -> None:
    """By the names in the folder, both when they are loaded and inspected."""
    folder = shutil.copytree(targets[name], tmp_path / "target")
    change(folder, removed, **{each: torch.zeros(shape) for each, shape in added.items()})
    change_config(folder, **fields)
    with pytest.raises(LoadError, match=message):
        models.load("mtp", None, folder)
    problems = inspect_drafter(folder).problems
    assert len(problems) == 1
    with pytest.raises(LoadError):
        models.load("mtp", folder)


def test_no_folder_and_files_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="mtp,target=DIR or mtp:DIR"):
        models.load("mtp", None)
    plain = save_model(tmp_path / "plain", "llama")
    with pytest.raises(LoadError, match="train heads by `paceline train mtp`"):
        models.load("mtp", None, plain)
    file = write_gguf(tmp_path / "model.gguf", plain)
    with pytest.raises(LoadError, match="MTP heads are read from Hugging Face folders"):
        models.load("mtp", None, file)


def test_an_inspection_says_which_heads_were_found(targets: dict[str, Path]) -> None:
    found = inspect_drafter(targets["DeepSeek, three heads"])
    assert (found.facts["method"], found.problems) == ("mtp", [])
    assert found.facts["heads"] == "3, as in DeepSeek-V3 in the target's own files"


def test_the_command_line_reads_the_heads_of_its_target(
    tmp_path: Path, targets: dict[str, Path]
) -> None:
    """`--drafter mtp` means those of the served target; without `--drafter` they are loaded too."""
    target = targets["MiMo"]
    specs = ["mtp,widths=2", "mtp:DIR", f"mtp,target={target}", "ngram", "unknown"]
    assert load_arguments(specs, target, "auto") == [
        f"--load=mtp,widths=2,target={target}",
        "--load=mtp:DIR",
        f"--load=mtp,target={target}",
        "--load=ngram",
        "--load=unknown",
    ]
    plain = save_model(tmp_path / "plain", "llama")
    with_heads, without = shipped.drafters_for(target), shipped.drafters_for(plain)
    assert [spec.partition("=")[0] for spec in with_heads] == ["mtp", "ngram"]
    assert with_heads[0].endswith(f",target={target}")
    assert [spec.partition("=")[0] for spec in without] == ["ngram", "selfspec"]
    assert shipped.only_looks_up(plain, on_gpu=False)
    assert not shipped.only_looks_up(target, on_gpu=False)


def test_a_recurrent_target_has_its_heads_or_look_up(
    tmp_path: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`selfspec`, the default of large targets in bfloat16, refuses it."""
    monkeypatch.setattr(shipped, "_LARGE", 0)
    for target, expected in (
        (targets["Qwen3.5"], ["mtp", "ngram"]),
        (save_model(tmp_path / "plain", "qwen3-5"), ["ngram"]),
    ):
        found = shipped.drafters_for(target, weights="bfloat16")
        assert [spec.partition("=")[0] for spec in found] == expected
        assert shipped.only_looks_up(target, on_gpu=False) == (expected == ["ngram"])
