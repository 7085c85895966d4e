"""What a command says while it waits."""

import io
import threading

import pytest
from rich.console import Console

from paceline.cli import progress


def test_without_a_terminal_lines_come_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST", 0.01)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    said: list[str] = []
    twice = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    with progress.waiting(lambda: f"step {len(said)}", say):
        assert twice.wait(60)
    assert said[:2] == ["step 0: 0 s so far", "step 1: 0 s so far"]


def test_what_ends_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.waiting(lambda: "a moment"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    with progress.waiting(lambda: "reading [the] weights"):
        pass
    assert "reading [the] weights" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue(), "the line is cleared"


def test_the_bar_shows_how_much_is_done_if_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, shown = io.StringIO(), threading.Semaphore(0)
    terminal = Console(file=screen, force_terminal=True, width=100, legacy_windows=False)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)

    def share() -> float:
        shown.release()
        return 0.5

    with progress.waiting(lambda: "fetching", share=share):
        assert all(shown.acquire(timeout=60) for _ in range(2)), "the first is shown now"
    assert "\u2501" * 20 + "\x1b[0m" in screen.getvalue(), "half of a bar of 40 characters"
