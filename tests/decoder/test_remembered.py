"""Values that transformers makes are made in a process that ends."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from paceline.convert.model_source import remembered_by_transformers
from paceline.decoder.remembered import cache_folder, remembered


@pytest.fixture(autouse=True)
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is stored, and transformers is not imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this process makes it")
def test_a_child_makes_the_value_once() -> None:
    made = remembered_by_transformers(("pid",), os.getpid)
    assert made != os.getpid()
    assert remembered_by_transformers(("pid",), os.getpid) == made


def fail() -> None:
    raise ValueError("a field is missing")


def test_the_error_of_a_value_that_cannot_be_made_is_raised() -> None:
    with pytest.raises(ValueError, match="a field is missing"):
        remembered_by_transformers(("failure",), fail)


def test_a_cache_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert remembered((number,), lambda: 7) == 7
            assert isinstance(remembered_by_transformers(("pid", number), os.getpid), int)
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}/file/paceline cannot be written, so that each start")


def test_values_are_kept_by_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.decoder.remembered._MAX_FILES", 2)
    made: list[int] = []
    for at, number in enumerate((0, 1, 0, 2, 0)):
        remembered((number,), lambda: made.append(number))  # noqa: B023 - it is called at once
        for file in cache_folder("configs").glob("*.json"):  # what was used now is `at` hours old
            if file.stat().st_mtime > 1e9:
                os.utime(file, (3600 * at, 3600 * at))
    assert made == [0, 1, 2]
