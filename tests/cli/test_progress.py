"""What a command says while it waits."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import progress
from paceline.service.phases import Phases


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


def test_a_model_is_described_by_path_size_and_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    assert progress.described(tmp_path) == f"{tmp_path} (2.0 MB, folder)"
    file = tmp_path / "a.gguf"
    file.touch()
    assert progress.described(file) == f"{file} (0.0 MB, GGUF file)"


def test_phases_have_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("paceline.service.phases.monotonic", lambda: now)
    phases, seen = Phases(), list[str]()
    phases.on_change = seen.append
    for name, seconds in (("reading", 2.0), ("checking", 0.25), ("reading", 1.0), ("", 5.0)):
        phases.begin(name)
        now += seconds
    phases.begin("capturing")
    phases.reached(1, 3)
    assert phases.seconds == {"reading": 3.0, "checking": 0.25}
    assert str(phases) == "reading 3.0 s"
    assert seen == ["reading", "checking", "reading", "", "capturing", "capturing, 1 of 3"]
