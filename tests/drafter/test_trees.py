"""Trees of all methods with a model against dense beam searches; the ranking of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter.growth.chain import ChainGrowth
from paceline.drafter.growth.levels import LevelGrowth
from paceline.drafter.growth.ranking import Ranker
from paceline.drafter.methods.base import Budget, Update
from paceline.kernels import SamplingRules, gumbel_noise_at
from paceline.tree import grow

from .models import (
    DENSE,
    GREEDY,
    SAMPLINGS,
    DenseLm,
    check_tree,
    load,
    made_up_states,
    start,
    target_kv,
    text_of,
    write_drafter,
    write_model,
)

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A method, the family of its target, and shapes of target and drafter."""

    method: str
    family: str = "llama"
    target: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)


CASES = {
    "lm, llama": Case("lm"),
    "lm, qwen3": Case("lm", "qwen3"),
    "longspec, window": Case("longspec", drafter={"window": 16}),
    "longspec, first layer, tied, narrow": Case(
        "longspec", "llama", {"tie_word_embeddings": True},
        {"target_layer": 0, "window": 1, "intermediate": 48},
    ),
    "longspec, reduced vocabulary": Case("longspec", drafter={"draft_vocab_size": 40}),
    "longspec, llama3": Case(
        "longspec", "qwen3", {"rope_parameters": {"rope_theta": 1e4, **_LLAMA3}}, {"window": 30}
    ),
    "dspark, window": Case("dspark", drafter={"markov_rank": 8, "window": 16, "layers": 2}),
    "dspark, tied, no confidence": Case(
        "dspark", "llama", {"tie_word_embeddings": True},
        {"markov_rank": 6, "confidence": False, "window": 3},
    ),
    "dspark, reduced vocabulary, state input": Case(
        "dspark", "qwen3", drafter={"markov_rank": 6, "draft_vocab_size": 40, "state_input": True}
    ),
    "dspark, confidence alone": Case("dspark", drafter={"window": 30}),
    "dspark, temperatures": Case(
        "dspark", drafter={"markov_rank": 8, "confidence_temperatures": (0.5, 2.0, 1.5, 3.0)}
    ),
    "dflash, yarn": Case(
        "dspark", "qwen3", {"rope_parameters": {"rope_theta": 1e4, **_YARN}},
        {"confidence": False, "from_anchor": False, "block": 5},
    ),
    "eagle3, window, reduced vocabulary": Case(
        "eagle3", drafter={"window": 16, "draft_vocab_size": 40, "taps": (0,)}
    ),
    "eagle3, 3.1, tied": Case(
        "eagle3", "llama", {"tie_word_embeddings": True}, {"fc_norm": True, "norm_output": True}
    ),
    "eagle3, normed residual, heads": Case(
        "eagle3", "qwen3", drafter={
            "norm_before_residual": True, "norm_before_fc": True, "qk_norm": True,
        },
    ),
    "mtp": Case("mtp", "qwen3", drafter={"draft_vocab_size": 40, "qk_norm": True, "window": 20}),
}  # fmt: skip


class Pair:
    """The folders of a drafter, and the same in dense PyTorch."""

    def __init__(self, folder: Path, name: str) -> None:
        case = CASES[name]
        self.method, self.folder = case.method, folder / "drafter"
        self.target: Path | None = folder / "target"
        self.dense: Any
        write_model(self.target, case.family, 1, **case.target)
        if case.method == "lm":
            self.folder, self.target = self.target, None
            self.dense = DenseLm(self.folder)
        else:
            write_drafter(case.method, self.folder, self.target, 1, **case.drafter)
            self.dense = DENSE[case.method](self.folder, self.target)

    @cache  # noqa: B019 - of a fixture of this module
    def load(self, widths: str, context: int | None = None, least: float = 0) -> Any:
        options = {"context": context} if context and self.method == "longspec" else {}
        options |= {"widths": widths, "min_survival": least, "max_nodes": 64}
        return load(self.method, self.folder, self.target, **options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = Pair(tmp_path_factory.mktemp("pair"), name)
        return made[name]

    return pair


LENGTHS = (2, 4, 17, 40, 90)  # shorter and longer than the windows


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10)
@given(data=st.data())
def test_trees_equal_a_dense_beam_search(pairs: Any, name: str, data: Any) -> None:
    """In every way that takes the text: in one native call, by levels, or as a chain."""
    pair = pairs(name)
    widths, context = data.draw(
        st.sampled_from([("4,4,4", None), ("2,5", 1024), ("1,1,1,1", 5), ("1,1,3,2", 20)])
    )
    least = data.draw(st.sampled_from([0, 0.03, 0.2]))
    drafter = pair.load(widths, context, least)
    levels = [int(width) for width in widths.split(",")]
    if pair.method == "dspark":
        levels += levels[-1:] * (4 - len(levels))
        assert drafter.max_depth == pair.dense.config.levels == 4
    if pair.method == "longspec":
        pair.dense.context = context or 0
    seed = data.draw(st.integers(0, 4))
    budget = Budget(data.draw(st.sampled_from([64, 5, 1])), data.draw(st.sampled_from([64, 3, 1])))
    text, sampling = (
        text_of(LENGTHS[seed], seed),
        SAMPLINGS[data.draw(st.sampled_from(list(SAMPLINGS)))],
    )
    source = pair.dense.source(text, seed)
    limits = {"nodes": budget.nodes, "depth": budget.depth, "min_survival": least}
    expected = pair.dense.tree(text, source, sampling, levels, **limits)
    ways = [way for way in drafter.growth.ways if way.takes(start(drafter, text, source, sampling))]
    assert isinstance(ways[-1], LevelGrowth)
    if isinstance(ways[0], ChainGrowth):  # whose penalties are those of its path
        del ways[1:]
    for way in ways:
        sequence = start(drafter, text, source, sampling)
        if way.takes(sequence):
            sequence.way = way
            check_tree(sequence.draft(budget), expected)


@pytest.mark.parametrize("method", ["longspec", "dspark"])
def test_a_drafter_tells_which_tokens_it_can_draft(pairs: Any, method: str) -> None:
    state_input = ", state input" if method == "dspark" else ""
    reduced = pairs(f"{method}, reduced vocabulary{state_input}")
    tokens = reduced.load("2").drafted_tokens
    assert tokens is not None
    assert tokens.tolist() == reduced.dense.model.d2t.tolist()
    assert pairs(f"{method}, window").load("2").drafted_tokens is None


def test_the_budget_of_target_kv_may_change_between_rounds(pairs: Any) -> None:
    pair = pairs("longspec, window")
    drafter, dense, text = pair.load("2,2"), pair.dense, text_of(60, 3)
    kv = target_kv(pair.target, dense.config, [*text, 5, 6, 7])
    kv.committed = len(text) - 1
    sequence = start(drafter, text, kv)
    for token, budget in ((5, 8), (6, 40), (7, 0)):
        drafter.options, dense.context = replace(drafter.options, context=budget), budget
        check_tree(sequence.draft(Budget(64, 64)), dense.tree(text, kv, GREEDY, [2, 2]))
        text.append(token)
        kv.committed += 1
        sequence.extend(Update([token]))


def test_hidden_states_older_than_the_window_are_not_read(pairs: Any) -> None:
    """And take no memory."""
    pair = pairs("dspark, window")
    window = pair.dense.config.window
    states = made_up_states(pair.dense.config, 899)
    states.spoil(0, 899 - window)
    sequence = start(pair.load("4"), text_of(900), states)
    before = sequence.cache.layer(0)[0].nbytes
    assert sequence.backlog == window
    assert len(sequence.draft(Budget(16, 4))) > 4
    assert sequence.cache.layer(0)[0].nbytes == before


# A rule of growth: depth to a list of children, the same for every node of that depth.
rules = st.lists(st.lists(st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=4)


@given(rules, st.integers(0, 20), st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_grow_takes_the_likeliest_paths(
    rule: list[list[float]], nodes: int, depth: int, floor: float
) -> None:
    def expand(state: None, level: int) -> list[tuple[int, float, None]]:
        children = rule[level] if level < len(rule) else []
        return [(token, confidence, None) for token, confidence in enumerate(children)]

    tree = grow(None, expand, nodes=nodes, depth=depth, min_survival=floor)
    tree.check()
    survivals = list(tree.survivals)
    assert survivals == sorted(survivals, reverse=True)
    everything = sorted(survivals_of(rule[:depth], 1.0, floor), reverse=True)
    assert survivals == pytest.approx(everything[:nodes])
    assert len({tree.path(node) for node in range(len(tree))}) == len(tree)


def survivals_of(rule: Sequence[Sequence[float]], reach: float, floor: float) -> list[float]:
    """Survival of every node there could be."""
    if not rule:
        return []
    below: list[float] = []
    for confidence in rule[0]:
        if reach * confidence >= floor:
            below.append(reach * confidence)
            below += survivals_of(rule[1:], reach * confidence, floor)
    return below


@pytest.mark.parametrize("vocab", [90, 5000, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_come_first_whatever_the_vocabulary(vocab: int, temperature: float) -> None:
    """Few tokens are likely, so those left out of a large vocabulary change nothing."""
    draws = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=draws)
    for row in logits:
        row[torch.randperm(vocab, generator=draws)[:40]] += 40.0
    params = SamplingRules(temperature=temperature, seed=2**64 - 9)
    ranker = Ranker(params, prompt=[1], output=[], vocab_size=vocab, candidates=64)
    ids, logs = ranker.rank(logits, 1000, 5)
    scores = logits
    if temperature:
        scores = logits / temperature + gumbel_noise_at(params.seed, 1000, torch.arange(vocab))
    expected = scores.log_softmax(-1).topk(5)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logs, expected.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingRules(temperature=0.0),
        SamplingRules(temperature=0.7, seed=5),
        SamplingRules(temperature=0.7, seed=5, top_p=0.9),
        SamplingRules(temperature=0.7, seed=5, repetition_penalty=1.3),
    ],
)
def test_a_reduced_vocabulary_ranks_as_the_whole_one_without_the_other_tokens(
    params: SamplingRules,
) -> None:
    draws = torch.Generator().manual_seed(1)
    drafted = torch.randperm(300, generator=draws)[:50].sort().values
    logits = torch.randn(1, 50, generator=draws) * 4
    whole = torch.full((1, 300), -torch.inf)
    whole[:, drafted] = logits
    reduced, all_ids = (
        Ranker(params, prompt=[1], output=[], vocab_size=290, candidates=64, drafted=tokens)
        for tokens in (drafted, None)
    )
    found, expected = reduced.rank(logits, 7, 5), all_ids.rank(whole, 7, 5)
    torch.testing.assert_close(found[1], expected[1])
    kept = found[1] > -torch.inf  # the ids of others are arbitrary
    assert torch.equal(found[0][kept], expected[0][kept])
    token, log, proposal = reduced.draw(logits[0], 7)
    expected_token, expected_log, expected_proposal = all_ids.draw(whole[0], 7)
    assert (token, log) == (expected_token, expected_log)
    assert proposal.tokens.tolist() == expected_proposal.tokens.tolist()
