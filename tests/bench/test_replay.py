"""Replays of recorded rounds: what was recorded comes out again, and rules are compared with it."""

from pathlib import Path

import pytest

from paceline.bench.replay.run import judge
from paceline.bench.replay.simulation import Simulation
from paceline.bench.replay.traces import Replay, Round, Text, Traces

STEP, DRAFT, LARGER = 2e-3, 5e-4, 3e-3
TABLE = {"tokens": (1, 5, 512), "seconds": (STEP, LARGER, 0.2)}


def traces(accepted: int, drafter: str = "some", tokens: int = 60) -> Traces:
    """Texts in which a chain of four nodes is accepted so far in every round.

    The verifier's own sources learn their confidences where trees are made; of a drafter's the
    scheduler learns what they are worth.
    """
    chance = 0.8 if accepted or drafter != "local" else 0.02
    plain = Text("chat", 30, [Round(1, 0.0, STEP)] * tokens)
    one = Round(accepted + 1, DRAFT, LARGER, (-1, 0, 1, 2), (chance,) * 4, tuple(range(accepted)))
    return Traces(
        drafter, TABLE, [plain] * 20, [Text("chat", 30, [one] * (tokens // (accepted + 1)))] * 20
    )


def test_a_tree_in_every_round_takes_what_was_recorded() -> None:
    recorded = traces(3)
    spent = Simulation(Replay(recorded, range(20)), 1, "always").run()
    per_round = {round(seconds / (tokens / 4), 6) for tokens, seconds in spent.values()}
    assert per_round == {round(DRAFT + LARGER, 6)}
    plain = Simulation(Replay(recorded, range(20)), 1, "plain").run()
    assert {round(seconds / tokens, 6) for tokens, seconds in plain.values()} == {STEP}


@pytest.mark.parametrize(("accepted", "better"), [(3, "always"), (0, "plain")])
@pytest.mark.parametrize("drafter", ["some", "local"])
def test_rules_are_compared_with_the_better_of_both(
    accepted: int, better: str, drafter: str
) -> None:
    figures = judge(traces(accepted, drafter), 1)["chat"]
    assert (figures["always"] > 1) == (better == "always")
    assert figures["over better"] == pytest.approx(
        figures["scheduled"] / max(1.0, figures["always"]), abs=2e-3
    )
    assert figures["over better"] > 0.9


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    recorded = traces(2)
    recorded.save(tmp_path / "some.json.gz")
    again = Traces.load(tmp_path / "some.json.gz")
    assert judge(again, 1) == judge(recorded, 1)
    assert again.drafted[0].tokens == recorded.drafted[0].tokens
