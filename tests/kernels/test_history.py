"""Stepping down and back up the paths of a tree."""

from __future__ import annotations

import pytest

from paceline.kernels import History


def test_push_and_pop_keep_counts() -> None:
    history = History([5, 6, 5], [7])
    history.push(7)
    history.push(6)
    assert history.counts == {7: 2, 6: 1}
    assert len(history) == 6
    assert history.pop() == 6
    assert history.pop() == 7
    assert history.counts == {7: 1}
    assert list(history.output) == [7]


def test_prompt_and_output_are_kept_apart() -> None:
    history = History([5, 6, 5], [7, 7])
    assert history.prompt == {5, 6}
    assert history.prompt_ids().tolist() == [5, 6]
    ids, counts = history.output_counts()
    assert ids.tolist() == [7]
    assert counts.tolist() == [2.0]


def test_popping_nothing_is_an_error() -> None:
    with pytest.raises(IndexError):
        History([1]).pop()
