"""Segments and plans: what is accepted, what they say."""

from __future__ import annotations

import pytest

from paceline.kernels import MAX_TREE_NODES, TreeSegment, plan_trees


def test_depths_and_positions_of_a_tree() -> None:
    segment = TreeSegment(sequence=0, start=10, parents=(-1, 0, 0, 1, -1), length=5)
    assert segment.depths == (0, 1, 1, 2, 0)
    assert plan_trees([segment]).positions.tolist() == [10, 11, 11, 12, 10]


def test_ancestors_mark_the_path() -> None:
    seen = TreeSegment(0, 0, (-1, 0, 0, 2), 4).ancestors()
    assert seen.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_a_chain_may_leave_its_parents_out() -> None:
    short, spelled = TreeSegment(0, 5, None, 4), TreeSegment(0, 5, (-1, 0, 1, 2), 4)
    assert short.is_chain
    assert spelled.is_chain
    assert short.depths == spelled.depths
    assert (short.ancestors() == spelled.ancestors()).all()


def test_a_plan_packs_segments_row_after_row() -> None:
    plan = plan_trees([TreeSegment(0, 3, None, 2), TreeSegment(1, 8, (-1, 0, 0), 3)])
    assert plan.offsets == (0, 2, 5)
    assert plan.rows == 5
    assert plan.longest == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, None, 0), "0 nodes"),
        ((0, 0, None, MAX_TREE_NODES + 1), "expected 1 to 256"),
        ((0, -1, None, 1), "must not be negative"),
        ((-1, 0, None, 1), "must not be negative"),
        ((0, 0, (-1,), 2), "1 parents"),
        ((0, 0, (-1, 1), 2), "topological order"),
        ((0, 0, (-2,), 1), "topological order"),
    ],
)
def test_bad_segments_are_refused(
    arguments: tuple[int, int, tuple[int, ...] | None, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TreeSegment(*arguments)


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        plan_trees([])
