"""Figures of whole requests, from runs without any service."""

import io

from rich.console import Console

from paceline.bench.comparison import Runs, show
from paceline.bench.services import Sample
from paceline.client import RoundStats, Stats


def sample(*rounds: tuple[int, int, int]) -> Sample:
    """Of rounds (drafted, accepted, emitted)."""
    stats = Stats()
    for numbers in rounds:
        stats.add(RoundStats(*numbers, round_ms=4.0, draft_ms=1.0, verify_ms=2.0, queue_ms=0.5))
    return Sample(list(range(sum(emitted for _, _, emitted in rounds))), 1.0, stats)


def summaries(rates: dict[str, float], drafted: Sample) -> dict[str, dict[str, object]]:
    samples = {"paceline none": sample((0, 0, 10)), "paceline ngram": drafted}
    found = {}
    for mode in rates:
        runs = Runs()
        runs.add(mode, rates, samples)
        found[mode] = runs.summary()
    return found


def test_figures() -> None:
    rates = {"transformers greedy": 5.0, "paceline none": 10.0, "paceline ngram": 20.0}
    rows = summaries(rates, sample((4, 2, 3), (0, 0, 6), (2, 0, 1)))
    found = rows["paceline ngram"]
    assert (found["rounds"], found["drafted_rounds"], found["drafted_share"]) == (3, 2, 0.2)
    assert found["accepted_length"] == 2.0
    assert (found["against_transformers_greedy"], found["against_paceline_none"]) == (4.0, 2.0)
    assert found["identical_to_paceline_none"]
    screen = io.StringIO()
    show("heldout", rows, Console(file=screen, width=160))
    assert "paceline ngram" in screen.getvalue()


def test_sampled_text_has_no_rows_of_transformers() -> None:
    rows = summaries({"paceline none": 10.0, "paceline ngram": 9.5}, sample((0, 0, 4), (0, 0, 5)))
    found = rows["paceline ngram"]
    assert found["drafted_share"] == 0.0
    assert not found["identical_to_paceline_none"]
    assert "accepted_length" not in found
    assert "against_transformers_greedy" not in found
