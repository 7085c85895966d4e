"""The contract of all methods with a model."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter.kv import KvGone
from paceline.drafter.methods.base import Budget, DraftSequence, GenerationInfo, Update
from paceline.tree import TokenTree

from . import models
from .models import (
    GREEDY,
    SAMPLINGS,
    VOCAB,
    made_up_kv,
    made_up_states,
    text_of,
    write_model,
)

METHODS = ("lm", "longspec", "dspark", "eagle3", "mtp", "selfspec")
READERS = METHODS[1:]
DRAFTERS: dict[str, dict[str, Any]] = {
    "longspec": {"window": 16},
    "dspark": {"markov_rank": 32, "window": 16, "layers": 2},
    "eagle3": {"norm_output": True, "window": 300},
    "mtp": {},
}
BUDGETS = ("lm, streaming", "lm, chunk_topk")  # ``lm`` under a KV budget, by policy


@dataclass
class Method:
    """A loaded drafter, and made-up data of the target for its generations."""

    drafter: Any
    field: str = ""  # field of ``GenerationInfo`` that holds the data; empty: it reads none

    def source(self, committed: int, seed: int = 0) -> Any:
        make = made_up_states if self.field == "states" else made_up_kv
        return make(self.drafter.shape, committed, seed)

    def start(self, text: list[int], sampling: Any = GREEDY, source: Any = None) -> DraftSequence:
        if source is None and self.field:
            source = self.source(len(text) - 1)
        sequence: DraftSequence = models.start(self.drafter, text, source, sampling)
        return sequence


def load(
    name: str, folder: Path, widths: str = "4,4,4,4", weights: str = "auto", **shape: Any
) -> Method:
    target = write_model(folder / "target", **shape)
    options: dict[str, Any] = {"widths": widths, "min_survival": 0, "weights": weights}
    method, _, policy = name.partition(", ")
    if method == "lm":
        budget = {"context": 24, "kv_policy": policy} if policy else {}
        return Method(models.load(method, target, **options, **budget))
    if name == "selfspec":
        return Method(models.load(name, target, **options, depth=4), "kv")
    layers = models.write_drafter(name, folder / name, target, **DRAFTERS[name])
    field = "kv" if name == "longspec" else "states"
    return Method(models.load(name, layers, target, **options), field)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Method]:
    names = (*METHODS, *BUDGETS)
    return {name: load(name, tmp_path_factory.mktemp("model")) for name in names}


def check_equal(tree: TokenTree, expected: TokenTree) -> None:
    assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
    assert tree.confidences == pytest.approx(expected.confidences, rel=1e-4)


@pytest.mark.parametrize("name", [*METHODS, *BUDGETS])
def test_sequences_drafted_together_get_their_own_trees(
    name: str, loaded: dict[str, Method]
) -> None:
    method = loaded[name]
    texts = [text_of(length, length) for length in (2, 3, 120, 40, 60)]
    late = Budget(16, 4, time.monotonic() - 1)
    budgets = [Budget(16, 4), Budget(3, 4), Budget(16, 2), Budget(0, 4), late]
    samplings = [GREEDY, SAMPLINGS["T=1"], SAMPLINGS["filtered"], GREEDY, GREEDY]
    jobs = list(zip(texts, samplings, budgets, strict=True))
    alone = [method.start(text, sampling).draft(budget) for text, sampling, budget in jobs]
    together = method.drafter.draft_many([(method.start(t, s), b) for t, s, b in jobs])
    for tree, expected in zip(together, alone, strict=True):
        check_equal(tree, expected)
    assert [bool(tree) for tree in together] == [True, True, True, False, True]
    assert together[-1].depth == 1, "a late tree got another level"


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=30)
@given(data=st.data())
def test_trees_fit_their_budget(name: str, loaded: dict[str, Method], data: Any) -> None:
    method = loaded[name]
    length = data.draw(st.integers(2, 50))
    budget = Budget(data.draw(st.integers(0, 20)), data.draw(st.integers(0, 6)))
    sampling = SAMPLINGS[data.draw(st.sampled_from(sorted(SAMPLINGS)))]
    sequence = method.start(text_of(length, length), sampling)
    tree = sequence.draft(budget)
    tree.check(VOCAB)
    assert len(tree) <= min(budget.nodes, method.drafter.max_nodes)
    assert tree.depth <= min(budget.depth, method.drafter.max_depth)
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    assert bool(tree) == (budget.nodes > 0 and budget.depth > 0)
    for node in range(-1, len(tree)):
        assert sum(tree.confidences[child] for child in tree.children(node)) <= 1 + 1e-5
    check_equal(sequence.draft(budget), tree)


@pytest.mark.parametrize("name", METHODS)
def test_a_tree_does_not_depend_on_how_the_text_came(name: str, loaded: dict[str, Method]) -> None:
    method = loaded[name]
    text, source = text_of(900), method.source(899)
    at_once = method.start(text, source=source).draft(Budget(16, 4))
    source.committed = 4
    in_parts = method.start(text[:5], source=source)
    for begin, end in ((5, 6), (6, 300), (300, 777), (777, 900)):
        in_parts.extend(Update(text[begin:end]))
        source.committed = end - 1
        in_parts.warm(100)
        in_parts.draft(Budget(end % 3, 2))
    for _ in range(2):
        check_equal(in_parts.draft(Budget(16, 4)), at_once)
    assert in_parts.backlog == 0


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_drafted_beyond_the_context(name: str, tmp_path: Path) -> None:
    method = load(name, tmp_path, "1,1,1,1", max_position_embeddings=64)
    for length, depth in ((60, 4), (62, 3), (63, 2), (64, 1), (65, 0), (80, 0)):
        sequence = method.start(text_of(length))
        assert sequence.draft(Budget(16, 4)).depth == depth
    sequence = method.start(text_of(60))
    sequence.extend(Update(text_of(5)))
    assert not sequence.draft(Budget(16, 4))


@pytest.mark.parametrize("name", METHODS)
def test_ids_beyond_the_target_s_vocabulary_are_never_drafted(
    name: str, loaded: dict[str, Method]
) -> None:
    method = loaded[name]
    data = {method.field: method.source(2)} if method.field else {}
    tree = method.drafter.start(GenerationInfo([1, 2, 3], 3, 10, **data)).draft(Budget(16, 4))
    assert len(tree) > 0
    assert max(tree.tokens) < 10


@pytest.mark.parametrize("name", READERS)
def test_data_beyond_the_text_is_not_read(name: str, loaded: dict[str, Method]) -> None:
    """The verifier may be ahead of the drafter: the tree is that of the drafter's own text."""
    method, text = loaded[name], text_of(60)
    ahead, level = method.source(100), method.source(100)
    ahead.spoil(59)
    level.committed = 59
    tree = method.start(text, source=ahead).draft(Budget(16, 4))
    assert tree == method.start(text, source=level).draft(Budget(16, 4))
    assert len(tree) > 4


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("gone", [0, 1])
def test_a_released_cache_fails_its_own_sequence_only(
    name: str, gone: int, loaded: dict[str, Method]
) -> None:
    method, text, other = loaded[name], text_of(60), 1 - gone
    sources = [method.source(59), method.source(59, seed=3)]
    expected = [method.start(text, source=each).draft(Budget(16, 4)) for each in sources]
    pair = [(method.start(text, source=each), Budget(16, 4)) for each in sources]
    sources[gone].gone = True
    found = method.drafter.draft_many(pair)
    assert isinstance(found[gone], KvGone)
    assert found[other] == expected[other]
    assert method.drafter.draft_many([pair[other]]) == [expected[other]]
    sources[gone].gone = False
    assert method.drafter.draft_many(pair) == expected


@pytest.mark.parametrize("name", READERS)
def test_a_generation_without_the_data_is_refused(name: str, loaded: dict[str, Method]) -> None:
    with pytest.raises(ValueError, match="with a read_grant"):
        loaded[name].drafter.start(GenerationInfo([1, 2], 2, VOCAB))


@pytest.mark.parametrize(
    ("name", "weights"), [("longspec", "int8"), ("dspark", "int4"), ("dspark", "bfloat16")]
)
def test_smaller_weights_draft_about_the_same(name: str, weights: str, tmp_path: Path) -> None:
    text, trees = text_of(30, 1), []
    for kind in ("auto", weights):
        method = load(name, tmp_path, "1", weights=kind, hidden_size=64, head_dim=32)
        trees.append(method.start(text).draft(Budget(8, 1)))
    exact, rough = trees
    assert exact.confidences != rough.confidences
    if weights != "int4":  # too rough for random weights
        assert exact.tokens == rough.tokens
        assert exact.confidences == pytest.approx(rough.confidences, abs=0.1)


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_is_freed_with_its_last_reference(name: str, tmp_path: Path) -> None:
    """Versions are unloaded while others serve: their memory must not wait for a collection."""
    method = load(name, tmp_path)
    sequence = method.start([1, 2, 3, 4])
    sequence.draft(Budget(8, 4))
    freed = weakref.ref(method.drafter)
    gc.collect()
    gc.disable()
    try:
        del method
        assert freed() is not None, "a sequence uses it"
        sequence.close()
        del sequence
        assert freed() is None
    finally:
        gc.enable()
