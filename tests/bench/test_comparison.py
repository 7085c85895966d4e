"""From runs to figures to tables."""

import io

from rich.console import Console

from paceline.bench import report
from paceline.bench.comparison import Runs, _note
from paceline.bench.served import Sample
from paceline.client import RoundStats, Stats


def sample(*rounds: tuple[int, int, int]) -> Sample:
    """Of rounds (drafted, accepted, emitted)."""
    stats = Stats()
    for numbers in rounds:
        stats.add(RoundStats(*numbers, round_ms=4.0, draft_ms=1.0, verify_ms=2.0, queue_ms=0.5))
    return Sample(list(range(sum(emitted for _, _, emitted in rounds))), 1.0, stats)


def summaries(rates: dict[str, float], drafted: Sample) -> dict[str, dict[str, object]]:
    runs = {mode: Runs() for mode in rates}
    samples = {"paceline none": sample((0, 0, 10)), "paceline ngram": drafted}
    _note(runs, rates, samples)
    return {mode: found.summary() for mode, found in runs.items()}


def shown(modes: dict[str, dict[str, object]]) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=160)
    echo = {"median": 100.0}
    results = {"comparison": {"x": modes}, "echo_us": echo, "echo_between_steps_us": echo}
    report.show(results, console)
    return screen.getvalue()


def test_figures_tell_how_much_was_drafted() -> None:
    rates = {"transformers greedy": 5.0, "paceline none": 10.0, "paceline ngram": 20.0}
    modes = summaries(rates, sample((4, 2, 3), (0, 0, 6), (2, 0, 1)))
    found = modes["paceline ngram"]
    assert (found["rounds"], found["drafted_rounds"], found["free_run_tokens"]) == (3, 2, 6)
    assert (found["accepted_length"], found["drafted_share"]) == (2.0, 0.2)
    assert (found["against_transformers_greedy"], found["against_paceline_none"]) == (4.0, 2.0)
    text = shown(modes)
    assert "2 of 3" in text
    assert "20%" in text
    assert "another text" not in text


def test_sampled_text_has_no_rows_of_transformers_and_says_why() -> None:
    rates = {"paceline none": 10.0, "paceline ngram": 9.5}
    modes = summaries(rates, sample((0, 0, 4), (0, 0, 6)))
    found = modes["paceline ngram"]
    assert (found["drafted_rounds"], found["drafted_share"]) == (0, 0.0)
    assert "accepted_length" not in found
    assert "against_transformers_greedy" not in found
    text = shown(modes)
    assert "0 of 2" in text
    assert "another text" in text
