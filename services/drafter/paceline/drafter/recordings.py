"""Texts of generations, recorded on this machine for training.

A text is one line of JSON.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.drafter.methods.base import LoadError
from paceline.v1 import sampling_pb2

logger = logging.getLogger("paceline.drafter")

MIN_BYTES = 1 << 20
"""Smallest limit of a recorder."""

_FILES = 8
"""A file holds at most this part of the limit; the oldest file is deleted first."""

_MAX_QUEUE = 64
"""Texts that wait to be written; further ones are lost."""

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

    A truncated last line, left by a process that was killed, is skipped. Raises ``LoadError``: a
    file cannot be read, there is no text, or a line is malformed.
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


class TextRecorder:
    """Appends texts to files in one folder, on a thread.

    :meth:`add` never waits. A text that cannot be recorded is counted as lost. The first failed
    write ends the recording, with one error in the log.

    Files have mode 0600 and are only appended to, one line for each text, so a killed process loses
    only texts that it had not written. Together they never exceed ``limit`` bytes. Use a recorder
    on one event loop.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        """Lock a folder, created if it is missing.

        ``limit`` is the maximum of bytes of all files; those of an earlier recorder are kept.

        Raises:
            ValueError: The limit is below 1 MiB.
            OSError: The folder cannot be created or written to, or another process records there.
        """
        if limit < MIN_BYTES:
            raise ValueError(
                f"the limit of recorded texts is {limit} bytes, expected {MIN_BYTES} or more"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._limit = folder, limit
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise OSError(
                f"another process records texts in {folder}; give each process its own folder"
            ) from error
        self.recording = True
        """Whether texts are recorded; False after a write failed."""
        self.recorded = 0
        """Texts that were recorded."""
        self.lost = 0
        """Texts that were not: too long, too many at a time, or a write failed."""
        self._file: int | None = None
        self._size = 0
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter-recorder")
        try:
            self._open_next_file()
        except OSError:
            self._release()
            raise
        logger.info("recording texts", extra={"folder": str(folder), "limit_bytes": limit})

    def add(self, text: Callable[[], Recording]) -> None:
        """Record a text in the background.

        ``text`` is called on the thread; a text for which it raises ValueError is lost.
        """
        if not self.recording or self._waiting >= _MAX_QUEUE:
            self.lost += 1
            return
        self._waiting += 1
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._write, text).add_done_callback(self._written)

    async def close(self) -> None:
        """Finish all writes, end the thread and unlock the folder."""
        await asyncio.to_thread(self._thread.shutdown)
        self.recording = False
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
        os.close(self._lock)

    def _written(self, writing: asyncio.Future[bool]) -> None:
        self._waiting -= 1
        error = writing.exception()
        if error is None and writing.result():
            self.recorded += 1
            return
        self.lost += 1
        if error is not None and self.recording:
            self.recording = False
            logger.error(
                "a write failed: texts are no longer recorded", extra={"fault": str(error)}
            )

    def _write(self, text: Callable[[], Recording]) -> bool:
        """Append a text. Returns whether it was recorded."""
        most = self._limit // _FILES
        try:
            line = text().to_json().encode() + b"\n"
        except ValueError:
            return False
        if len(line) > most or not self.recording:
            return False
        if self._size + len(line) > most:
            self._open_next_file()
        assert self._file is not None, "opened"
        # In one write, so that only the last line of a file can be truncated.
        if os.write(self._file, line) != len(line):
            raise OSError(f"no space is left in {self._folder}")
        self._size += len(line)
        return True

    def _open_next_file(self) -> None:
        """Create a file, after deleting the oldest ones until it fits the limit."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        files = sorted(self._folder.glob("texts-*.jsonl"))
        used = sum(file.stat().st_size for file in files)
        for file in files:
            if used + self._limit // _FILES <= self._limit:
                break
            used -= file.stat().st_size
            file.unlink()
        path = self._folder / f"texts-{time.time_ns():020}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
