"""Reads recorded texts."""

from __future__ import annotations

from pathlib import Path

from paceline.drafter.methods.base import LoadError
from paceline.drafter.recordings.text import Recording


def read_recordings(path: Path) -> list[Recording]:
    """Recordings of a file of JSON lines, or of all of a recorder's files, oldest first.

    A last line that was cut off, because its writer died, is left out.

    Raises:
        LoadError: Nothing can be read, there is no text, or a line has another form
            (:meth:`Recording.from_json`).
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [recording for file in files for recording in _read(file)]
    if not found:
        raise LoadError(
            "UNREADABLE_RECORDINGS", f"{path} holds no texts: expected a line of JSON for each"
        )
    return found


def _read(file: Path) -> list[Recording]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise LoadError("UNREADABLE_RECORDINGS", f"cannot read {file}: {error}") from error
    recordings = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            recordings.append(Recording.from_json(line.decode()))
        except (ValueError, LookupError, TypeError) as error:
            if number == len(lines):
                break  # no line end: cut off
            raise LoadError(
                "UNREADABLE_RECORDINGS",
                f"{file} line {number}: expected a JSON object with the token ids 'prompt' and "
                f"'tokens' ({type(error).__name__}: {error})",
            ) from error
    return recordings
