"""Heads for multi-token prediction of every layout, against a dense reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.drafter.methods.base import Budget, Update

from . import models
from .models import GREEDY, SAMPLINGS, check_tree, made_up_states, text_of
from .mtp_heads import LAYOUTS, DenseMtp, write_target

WIDTHS = (3, 4, 2)
OPTIONS = {"widths": "3,4,2", "min_survival": 0}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_target(tmp_path_factory.mktemp("target"), name) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trees_are_those_of_a_dense_reference(name: str, targets: dict[str, Path]) -> None:
    """Of texts that were processed before the round, and read within it."""
    drafter = models.load("mtp", None, targets[name], **OPTIONS)
    dense = DenseMtp(targets[name], name)
    for length in (2, 9, 40):
        for sampling in (GREEDY, SAMPLINGS["T=1"]):
            text = text_of(length + 5, length)
            states = made_up_states(drafter.shape, len(text) - 1)
            sequence = models.start(drafter, text[:length], states, sampling)
            for begin in (length, length + 3):
                states.committed = begin - 1
                tree = sequence.draft(Budget(9, 3))
                check_tree(tree, dense.tree(text[:begin], states, sampling, WIDTHS))
                sequence.extend(Update(text[begin : begin + 3]))
