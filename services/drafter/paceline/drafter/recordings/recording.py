"""Recorded texts, one line of JSON each."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.drafter.methods.base import LoadError
from paceline.v1 import sampling_pb2

MAX_TOKENS = 1 << 16
"""Longest text, prompt included. Unit: tokens."""


@dataclass(frozen=True)
class Recording:
    """A text as token ids of the target's tokenizer, at least one before and one after the anchor.

    Raises:
        ValueError: A field is out of range.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The generated tokens."""

    temperature: float = 0.0
    seed: int = 0
    target: str = ""
    """Fingerprint of the target; empty: unknown."""

    def __post_init__(self) -> None:
        ids = self.prompt + self.tokens
        valid = 0 <= self.temperature < math.inf and 0 <= self.seed < 1 << 64
        valid &= all(isinstance(token, int) and 0 <= token < 1 << 32 for token in ids)
        if not (valid and self.prompt and self.tokens and len(ids) <= MAX_TOKENS):
            raise ValueError("prompt and tokens must be token ids, at least one each")

    @property
    def sampling(self) -> sampling_pb2.SamplingParams:
        """Sampling parameters of the tokens."""
        return sampling_pb2.SamplingParams(temperature=self.temperature, seed=self.seed)

    @classmethod
    def from_json(cls, line: str) -> Recording:
        """Read ``{"prompt": [...], "tokens": [...]}``; the other fields are optional.

        Raises:
            ValueError: It is malformed.
            LookupError: A field is missing.
            TypeError: A field has the wrong type.
        """
        value: dict[str, Any] = json.loads(line)
        return cls(
            tuple(value["prompt"]),
            tuple(value["tokens"]),
            float(value.get("temperature", 0.0)),
            int(value.get("seed", 0)),
            str(value.get("target", "")),
        )

    def to_json(self) -> str:
        """The line, without its end."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_recordings(path: Path) -> list[Recording]:
    """Read a file of JSON lines, or all files of a recorder, oldest first.

    A truncated last line, left by a process that was killed, is skipped.

    Raises:
        LoadError: A file cannot be read, there is no text, or a line is malformed.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [recording for file in files for recording in _read(file)]
    if not found:
        raise LoadError(
            "UNREADABLE_RECORDINGS", f"{path} holds no texts, expected a line of JSON for each"
        )
    return found


def _read(file: Path) -> list[Recording]:
    try:
        *lines, rest = file.read_bytes().split(b"\n")
    except OSError as error:
        raise LoadError("UNREADABLE_RECORDINGS", f"cannot read {file}: {error}") from error
    recordings = []
    for number, line in enumerate((*lines, rest), 1):
        try:
            if line:
                recordings.append(Recording.from_json(line.decode()))
        except (ValueError, LookupError, TypeError) as error:
            if number > len(lines):
                break  # no line end: truncated
            raise LoadError(
                "UNREADABLE_RECORDINGS",
                f"{file} line {number}: expected a JSON object with the token ids 'prompt' and "
                f"'tokens' ({type(error).__name__}: {error})",
            ) from error
    return recordings
