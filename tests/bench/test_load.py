"""What the load comes to, without any service."""

import io
from typing import Any

from rich.console import Console

from paceline.bench.load import report as load_report
from paceline.bench.load.turns import MODES
from paceline.bench.load.users import User, Window
from paceline.bench.page import pictures
from paceline.client import RoundStats


def entry(drafted: int, checked: int, emitted: int, budget: int) -> RoundStats:
    return RoundStats(
        drafted=drafted,
        accepted=max(0, emitted - 1),
        emitted=emitted,
        round_ms=4.0,
        draft_ms=1.0,
        verify_ms=2.0,
        queue_ms=0.0,
        checked=checked,
        node_budget=budget,
    )


def window() -> Window:
    rounds = [entry(8, 4, 3, 6), entry(0, 0, 1, 0)]
    users = [User(5.0, [10.0, 30.0], 8, rounds), User(None, [], 0, [])]
    return Window(1.0, 3.0, 16, users)


def figures() -> dict[str, Any]:
    modes = {mode: {**window().summary(), "runs": [8.0, 8.0]} for mode in MODES}
    modes["scheduled"]["beside"] = {"plain": [8.0, 8.0], "fixed": [18.0, 8.0]}
    return {"drafter": "ngram", "closed": {"1": modes, "8": modes}, "open": {"2": modes}}


def test_a_window_counts_what_users_saw_in_it() -> None:
    summary = window().summary()
    assert summary["tokens_per_second"] == 8.0
    assert summary["generations"] == 1, "one user saw nothing in the window"
    assert summary["user_tokens_per_second"]["p50"] == 200.0
    assert summary["between_messages_ms"]["p50"] == 20.0
    assert summary["drafted_share"] == 0.75
    assert (summary["drafted_nodes"], summary["checked_nodes"]) == (8, 4)
    assert (summary["node_budget"], summary["budget_0_share"]) == (3, 0.5)


def test_tables_and_picture_show_every_point() -> None:
    console = Console(file=io.StringIO(), width=200)
    load_report.show(figures(), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("fixed") == 3
    assert text.count("1.50") == 3, "scheduled over fixed"
    (first,), (second,) = pictures.load(figures()), pictures.load(figures())
    assert first == second
