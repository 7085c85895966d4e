"""The drills at small scale; `make drills` runs all of them at full scale."""

from pathlib import Path

import pytest

from paceline.bench.drills.load import Outcome
from paceline.bench.drills.run import DRILLS, run_all
from paceline.bench.drills.world import SHORT
from paceline.bench.models import Models

DEMO = Path(__file__).parents[2] / "models" / "demo"
MODELS = Models(DEMO, DEMO / "target")
# Deaths of a process, a drafter that is stopped and hostile drafters are tested in tests/system.
HERE = (
    "swap", "verifier stopped", "three verifiers", "verifier out of KV", "clock jumps",
    "abandoned clients", "forged handles",
)  # fmt: skip


@pytest.mark.slow
async def test_what_must_hold_does() -> None:
    outcomes: dict[str, Outcome] = {}

    def record(name: str, outcome: Outcome, seconds: float) -> None:
        outcomes[name] = outcome

    await run_all([DRILLS[name] for name in HERE], SHORT, MODELS, record)
    assert list(outcomes) == list(HERE)
    broken = {
        name: (outcome.checks, outcome.figures)
        for name, outcome in outcomes.items()
        if not (outcome.passed or outcome.skipped)
    }
    assert not broken
    if skipped := {name: o.skipped for name, o in outcomes.items() if o.skipped}:
        pytest.skip(f"all but these held: {skipped}")
