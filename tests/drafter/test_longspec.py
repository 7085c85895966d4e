"""The LongSpec drafter against dense references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.drafter.methods.base import Budget, Update

from .longspec_models import (
    Dense,
    load,
    start,
    target_kv,
    write_longspec,
)
from .models import GREEDY, SAMPLINGS, check_tree, text_of, write_model

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "last layer": ("llama", {}, {}),
    "window": ("llama", {}, {"window": 16}),
    "first layer, tied": ("llama", {"tie_word_embeddings": True}, {"layer": 0, "window": 5}),
    "no final norm": ("llama", {}, {"final_norm": False, "window": 1, "intermediate": 48}),
    "reduced vocabulary": ("llama", {}, {"draft_vocab_size": 40}),
    "yarn": ("qwen3", {"rope_parameters": {"rope_theta": 1e4, **_YARN}}, {"window": 30}),
    "llama3": ("llama", {"rope_parameters": {"rope_theta": 1e4, **_LLAMA3}}, {"window": 30}),
}


def write_pair(folder: Path, name: str, seed: int = 1) -> tuple[Path, Path]:
    """A target and a drafter for it."""
    family, shape, layer = TARGETS[name]
    target = write_model(folder / "target", family, seed, **shape)
    return write_longspec(folder / "drafter", target, seed, **layer), target


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_pair(tmp_path_factory.mktemp("longspec"), request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("longspec"), "window")


@pytest.mark.parametrize(
    ("widths", "context"), [("4,4,4", 0), ("2,5", 1024), ("1,1,1,1", 5), ("1,3,2", 20)]
)
def test_trees_equal_a_dense_beam_search(
    pair: tuple[Path, Path], widths: str, context: int
) -> None:
    """On the target's KV, with all samplings, for texts shorter and longer than the window."""
    drafter = load(*pair, widths=widths, min_survival="0", max_nodes="64", context=str(context))
    dense = Dense(*pair, context)
    levels = [int(width) for width in widths.split(",")]
    for seed, (length, sampling) in enumerate(zip((1, 4, 17, 40, 90), SAMPLINGS, strict=True)):
        text = text_of(length, seed)
        kv = target_kv(pair[1], dense.config, text)
        tree = start(drafter, text, kv, SAMPLINGS[sampling]).draft(Budget(64, 64))
        expected = dense.tree(text, kv, SAMPLINGS[sampling], levels)
        check_tree(tree, expected)


def test_the_budget_may_change_between_rounds(small: tuple[Path, Path]) -> None:
    drafter = load(*small, widths="2,2", min_survival="0", max_nodes="64")
    dense, text = Dense(*small, 0), text_of(60, 3)
    kv = target_kv(small[1], dense.config, [*text, 5, 6, 7])
    kv.committed = len(text) - 1
    sequence = start(drafter, text, kv)
    for token, budget in ((5, 8), (6, 40), (7, 0)):
        drafter.options, dense.context = replace(drafter.options, context=budget), budget
        tree = sequence.draft(Budget(64, 64))
        expected = dense.tree(text, kv, GREEDY, [2, 2])
        check_tree(tree, expected)
        text.append(token)
        kv.committed += 1
        sequence.extend(Update([token]))
