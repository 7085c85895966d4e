"""The DSpark drafter against a dense reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter.methods.base import Budget, Generation, Update
from paceline.drafter.methods.dspark.drafter import DSparkDrafter

from .dspark_models import Dense, load, made_up_states, start, write_dspark
from .models import GREEDY, SAMPLINGS, VOCAB, text_of, write_model

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WIDE_HEADS = {"hidden_size": 64, "head_dim": 32}  # which the compiled kernels take
DRAFTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "markov": ("llama", {}, {"markov_rank": 8}),
    "compiled, window": ("llama", WIDE_HEADS, {"markov_rank": 8, "window": 16, "layers": 2}),
    "gated, tied": (
        "llama", {"tie_word_embeddings": True}, {"markov_rank": 6, "markov_head": "gated"},
    ),
    "rnn, two layers": ("qwen3", {}, {"markov_rank": 6, "markov_head": "rnn", "layers": 2}),
    "no confidence": ("llama", {}, {"markov_rank": 6, "confidence": False, "window": 3}),
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
    return write_pair(tmp_path_factory.mktemp("dspark"), "compiled, window")


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
        tree.check(VOCAB)
        expected = dense.tree(text, states, SAMPLINGS[sampling], levels)
        assert {tree.path(node) for node in range(len(tree))} == set(expected)
        for node in range(len(tree)):
            assert tree.survivals[node] == pytest.approx(
                torch.tensor(expected[tree.path(node)]).exp().item(), rel=2e-3, abs=1e-6
            )


def test_a_tree_does_not_depend_on_how_the_text_came(pair: tuple[Path, Path]) -> None:
    drafter, dense = _loaded(pair)
    text = text_of(900)
    states = made_up_states(dense.config, 899)
    at_once = start(drafter, text, states).draft(Budget(16, 4))
    states.committed = 4
    in_parts = start(drafter, text[:5], states)
    for begin, end in ((5, 6), (6, 300), (300, 777), (777, 900)):
        in_parts.extend(Update(text[begin:end]))
        states.committed = end - 1
        in_parts.warm(7)
        in_parts.draft(Budget(end % 3, 2))
    for _ in range(2):
        tree = in_parts.draft(Budget(16, 4))
        assert (tree.tokens, tree.parents) == (at_once.tokens, at_once.parents)
        assert tree.confidences == pytest.approx(at_once.confidences, rel=1e-4)
    assert in_parts.backlog == 0


def test_sequences_drafted_together_get_their_own_trees(pair: tuple[Path, Path]) -> None:
    drafter, dense = _loaded(pair)
    lengths = (2, 3, 300, 40, 60)
    texts = [text_of(length, length) for length in lengths]
    states = [made_up_states(dense.config, length - 1, length) for length in lengths]
    budgets = [Budget(16, 4), Budget(3, 4), Budget(16, 2), Budget(0, 4), Budget(16, 4, 0.0)]
    samplings = [GREEDY, SAMPLINGS["T=1"], SAMPLINGS["filtered"], GREEDY, GREEDY]
    jobs = list(zip(texts, states, samplings, budgets, strict=True))
    alone = [start(drafter, t, kept, s).draft(budget) for t, kept, s, budget in jobs]
    together = drafter.draft_many([(start(drafter, t, kept, s), b) for t, kept, s, b in jobs])
    for mine, own in zip(together, alone, strict=True):
        assert (mine.tokens, mine.parents) == (own.tokens, own.parents)
        assert mine.confidences == pytest.approx(own.confidences, rel=1e-4)
    assert [bool(tree) for tree in together] == [True, True, True, False, True]
    assert together[-1].depth == 1  # it was late already


@settings(max_examples=50)
@given(data=st.data())
def test_trees_are_good_ones(small: tuple[Path, Path], data: Any) -> None:
    drafter, dense = _loaded(small)
    length = data.draw(st.integers(1, 50))
    budget = Budget(data.draw(st.integers(0, 20)), data.draw(st.integers(0, 6)))
    sampling = SAMPLINGS[data.draw(st.sampled_from(sorted(SAMPLINGS)))]
    states = made_up_states(dense.config, length - 1)
    sequence = start(drafter, text_of(length, length), states, sampling)
    tree = sequence.draft(budget)
    tree.check(VOCAB)
    assert len(tree) <= min(budget.nodes, drafter.max_nodes)
    assert tree.depth <= min(budget.depth, drafter.max_depth)
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    assert bool(tree) == (budget.nodes > 0 and budget.depth > 0 and length > 1)
    assert sequence.draft(budget) == tree


def test_siblings_share_what_the_head_gives_them(small: tuple[Path, Path]) -> None:
    tree = start(
        _loaded(small)[0], text_of(30), made_up_states(_loaded(small)[1].config, 29)
    ).draft(Budget(16, 4))
    for node in range(-1, len(tree)):
        shares = [tree.confidences[child] for child in tree.children(node)]
        assert sum(shares) <= 1 + 1e-5


def test_the_future_of_the_target_is_not_read(small: tuple[Path, Path]) -> None:
    """A verifier may be ahead of what the drafter was told; the tree is that of its own text."""
    drafter, dense = _loaded(small)
    text = text_of(60)
    ahead, level = made_up_states(dense.config, 100), made_up_states(dense.config, 59)
    ahead.states[59:] = torch.nan
    tree = start(drafter, text, ahead).draft(Budget(16, 4))
    assert tree == start(drafter, text, level).draft(Budget(16, 4))
    assert len(tree) > 4


def test_memory_is_constant_with_a_window(small: tuple[Path, Path]) -> None:
    """And states that are older than the window are never asked for."""
    drafter, dense = _loaded(small)
    states = made_up_states(dense.config, 899)
    states.states[: 899 - dense.config.window] = torch.nan
    sequence = start(drafter, text_of(900), states)
    before = sequence.context.nbytes
    assert sequence.backlog == dense.config.window
    assert len(sequence.draft(Budget(16, 4))) > 4
    assert sequence.context.nbytes == before


def test_states_that_are_gone_already_cost_no_more_than_the_guess(small: tuple[Path, Path]) -> None:
    drafter, dense = _loaded(small)
    states = made_up_states(dense.config, 99)
    states.kept = 5
    assert start(drafter, text_of(100), states).draft(Budget(16, 4))


@pytest.mark.bits
def test_a_cache_that_is_gone_is_an_error_and_no_harm(small: tuple[Path, Path]) -> None:
    drafter, dense = _loaded(small)
    text = text_of(60)
    states, other = made_up_states(dense.config, 59), made_up_states(dense.config, 59, seed=3)
    expected = [start(drafter, text, each).draft(Budget(16, 4)) for each in (states, other)]
    pair = [(start(drafter, text, each), Budget(16, 4)) for each in (states, other)]
    states.gone = True
    with pytest.raises(ConnectionError):
        drafter.draft_many(pair)
    assert drafter.draft_many(pair[1:]) == expected[1:]
    states.gone = False
    assert drafter.draft_many(pair) == expected


def test_a_generation_without_states_is_refused(small: tuple[Path, Path]) -> None:
    drafter, _ = _loaded(small)
    with pytest.raises(ValueError, match="attach with read_grant"):
        drafter.start(Generation([1, 2], 2, VOCAB))


def test_nothing_is_drafted_beyond_the_target_s_context(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", max_position_embeddings=64)
    drafter = load(write_dspark(tmp_path / "drafter", target), target, widths="1", min_survival="0")
    for length, depth in ((60, 4), (62, 3), (63, 2), (64, 1), (65, 0), (80, 0)):
        states = made_up_states(drafter.backbone.config, length - 1)
        assert start(drafter, text_of(length), states).draft(Budget(16, 4)).depth == depth
