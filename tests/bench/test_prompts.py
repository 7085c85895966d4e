"""The benchmark's prompts, made from the repository's demo files."""

from pathlib import Path

import pytest

from paceline.bench.models import Models
from paceline.bench.prompts import long_prompts

FOLDER = Path(__file__).parents[2] / "models" / "demo"
DEMO = Models(FOLDER, FOLDER / "target")


def test_long_prompts_are_pieces_of_held_out_files() -> None:
    first, second = long_prompts(DEMO.prompts, DEMO.target, 960, 2)
    assert len(first) == len(second) == 960
    assert first != second
    with pytest.raises(ValueError, match="expected at least 1000000"):
        long_prompts(DEMO.prompts, DEMO.target, 1_000_000, 1)
