"""The option ``lookup``: earlier text first, then the model, and both trees as one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.methods.base import Budget, GenerationInfo, LoadError, Resources, Update
from paceline.drafter.methods.lookup import LookupDrafter
from paceline.drafter.registry import Loader
from paceline.drafter.spec import DrafterSpec, Roots
from paceline.tree import EMPTY, TokenTree, merge
from paceline.v1 import sampling_pb2

from .models import SAMPLINGS, VOCAB, load, text_of, write_model

LARGE = Budget(255, 255)
NEW = random.Random(3).sample(range(VOCAB), 30)
REPEATED = text_of(12, 4) * 5


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """A tree without equal siblings, as drafters make them."""
    tree = TokenTree((), (), ())
    for _ in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(-1, len(tree) - 1)), draw(st.integers(0, 3))
        if tree.child(parent, token) is None:
            confidence = draw(st.floats(0, 1, width=32))
            tree = TokenTree(
                (*tree.tokens, token), (*tree.parents, parent), (*tree.confidences, confidence)
            )
    return tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tree.path(node) for node in range(len(tree))}


@given(trees(), trees(), st.integers(0, 24), st.integers(0, 12))
def test_a_merged_tree_has_the_likeliest_nodes_of_both(
    first: TokenTree, second: TokenTree, nodes: int, depth: int
) -> None:
    whole, merged = (
        merge(first, second, nodes=each.nodes, depth=each.depth)
        for each in (LARGE, Budget(nodes, depth))
    )
    for tree in (whole, merged):
        tree.check()
        assert len(paths(tree)) == len(tree)
    assert paths(whole) == paths(first) | paths(second)
    if len(first) and len(second):
        assert len(merged) <= nodes
        assert merged.depth <= depth
        assert paths(merged) <= paths(whole)
        for node in range(-1, len(whole)):
            chances = [whole.confidences[child] for child in whole.children(node)]
            assert sum(chances) <= 1 + 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lookup") / "model", "llama", 3)


def generation(text: list[int], sampling: str = "greedy") -> GenerationInfo:
    return GenerationInfo(text, len(text), VOCAB, SAMPLINGS[sampling])


def test_a_new_text_gets_the_tree_of_the_model(folder: Path) -> None:
    model = load("lm", folder, widths="3,2", max_nodes="8")
    drafter = LookupDrafter(load("lm", folder, widths="3,2", max_nodes="8"))
    budget = Budget(8, 4)
    expected = model.start(generation(NEW)).draft(budget)
    sequence = drafter.start(generation(NEW))
    assert len(sequence.lookup.draft(budget)) == 0
    assert sequence.draft(budget) == expected


def test_the_model_rests_where_the_text_repeats_itself(folder: Path) -> None:
    drafter = LookupDrafter(load("lm", folder, widths="1", depth="2"))
    sequence = drafter.start(generation(REPEATED))
    rests, text = [], list(REPEATED)
    for _ in range(12):
        before = sequence.expected
        tree = sequence.draft(Budget(8, 8))
        rests.append(sequence.expected == before)
        following = text[len(text) - 12]
        assert following in [tree.tokens[child] for child in tree.children(-1)]
        text.append(following)
        sequence.extend(Update([following]))
    assert not rests[0]
    assert rests[-1]
    assert sequence.model.backlog > 1  # it catches up when it drafts again
    sequence.warm(100)
    assert sequence.model.backlog <= 1


def test_rejection_sampling_gets_whole_trees_of_one_drafter(folder: Path) -> None:
    sampling = sampling_pb2.SamplingParams(
        temperature=1.0, seed=4, mode=sampling_pb2.ACCEPTANCE_MODE_REJECTION
    )
    drafter = LookupDrafter(load("lm", folder, widths="1", depth="3"))
    tree = drafter.start(GenerationInfo(REPEATED, len(REPEATED), VOCAB, sampling)).draft(
        Budget(8, 8)
    )
    assert tree.is_chain
    assert len(tree.proposals) in (0, len(tree))


def test_sequences_draft_together_as_they_do_alone(folder: Path) -> None:
    drafter = LookupDrafter(load("lm", folder, widths="3,2", max_nodes="8"))
    budget = Budget(12, 6)
    texts = (NEW, REPEATED, text_of(25, 9))
    alone = [drafter.start(generation(text)).draft(budget) for text in texts]
    together = [(drafter.start(generation(text)), budget) for text in texts]
    assert drafter.draft_many(together) == alone
    assert drafter.draft_many([(together[0][0], Budget(0, 4))]) == [EMPTY]


async def test_every_method_has_the_option(folder: Path) -> None:
    loader = Loader(Roots([folder.parent]), Resources())
    drafter = await loader.load(DrafterSpec.parse(f"lm:{folder},widths=1,lookup=true"))
    assert isinstance(drafter, LookupDrafter)
    assert drafter.max_nodes == 32
    drafter.close()
    plain = await loader.load(DrafterSpec.parse(f"lm:{folder},lookup=false"))
    assert not isinstance(plain, LookupDrafter)
    with pytest.raises(LoadError, match="truth value"):
        await loader.load(DrafterSpec.parse(f"lm:{folder},lookup=maybe"))
