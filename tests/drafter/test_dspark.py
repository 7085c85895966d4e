"""The DSpark drafter against a dense reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.drafter.methods.base import Budget
from paceline.drafter.methods.dspark.drafter import DSparkDrafter

from .dspark_models import Dense, load, made_up_states, start, write_dspark
from .models import SAMPLINGS, check_tree, text_of, write_model

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DRAFTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "markov": ("llama", {}, {"markov_rank": 8}),
    "window": ("llama", {}, {"markov_rank": 8, "window": 16, "layers": 2}),
    "gated, tied": (
        "llama", {"tie_word_embeddings": True}, {"markov_rank": 6, "markov_head": "gated"},
    ),
    "rnn, two layers": ("qwen3", {}, {"markov_rank": 6, "markov_head": "rnn", "layers": 2}),
    "no confidence": ("llama", {}, {"markov_rank": 6, "confidence": False, "window": 3}),
    "reduced vocabulary": ("llama", {}, {"markov_rank": 6, "draft_vocab_size": 40}),
    "state input": ("llama", {}, {"markov_rank": 6, "window": 16, "state_input": True}),
    "confidence alone": ("llama", {}, {"window": 30}),
    "dflash, yarn": (
        "qwen3",
        {"rope_parameters": {"rope_theta": 1e4, **_YARN}},
        {"confidence": False, "from_anchor": False, "block": 5},
    ),
}  # fmt: skip


def write_pair(folder: Path, name: str, seed: int = 1) -> tuple[Path, Path]:
    """A drafter and its target."""
    family, shape, drafter = DRAFTERS[name]
    target = write_model(folder / "target", family, seed, **shape)
    return write_dspark(folder / "drafter", target, seed, **drafter), target


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_pair(tmp_path_factory.mktemp("dspark"), request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("dspark"), "window")


_LOADED: dict[Path, tuple[DSparkDrafter, Dense]] = {}


def _loaded(pair: tuple[Path, Path]) -> tuple[DSparkDrafter, Dense]:
    if pair[0] not in _LOADED:
        _LOADED[pair[0]] = load(*pair, widths="4"), Dense(*pair)
    return _LOADED[pair[0]]


@pytest.mark.parametrize("widths", ["4,4,4", "2,5", "1", "1,3,2"])
def test_trees_equal_a_dense_beam_search(pair: tuple[Path, Path], widths: str) -> None:
    """With all samplings, for texts shorter and longer than the window."""
    drafter = load(*pair, widths=widths, min_survival="0", max_nodes="64")
    dense = _loaded(pair)[1]
    given_widths = [int(width) for width in widths.split(",")]
    levels = [given_widths[min(i, len(given_widths) - 1)] for i in range(4)]
    assert drafter.max_depth == dense.config.levels == 4
    for seed, (length, sampling) in enumerate(zip((2, 4, 17, 40, 90), SAMPLINGS, strict=True)):
        text = text_of(length, seed)
        states = made_up_states(dense.config, length - 1, seed)
        tree = start(drafter, text, states, SAMPLINGS[sampling]).draft(Budget(64, 64))
        expected = dense.tree(text, states, SAMPLINGS[sampling], levels)
        check_tree(tree, expected)


def test_memory_is_constant_with_a_window(small: tuple[Path, Path]) -> None:
    """Hidden states older than the window are not read."""
    drafter, dense = _loaded(small)
    states = made_up_states(dense.config, 899)
    states.spoil(0, 899 - dense.config.window)
    sequence = start(drafter, text_of(900), states)
    before = sequence.context.nbytes
    assert sequence.backlog == dense.config.window
    assert len(sequence.draft(Budget(16, 4))) > 4
    assert sequence.context.nbytes == before


def test_missing_states_do_not_prevent_a_draft(small: tuple[Path, Path]) -> None:
    drafter, dense = _loaded(small)
    states = made_up_states(dense.config, 99, window=5)
    assert start(drafter, text_of(100), states).draft(Budget(16, 4))
