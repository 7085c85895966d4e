"""Keeps the texts of generations on disk."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.drafter.recordings.text import Recording

logger = logging.getLogger("paceline.drafter")

LEAST_BYTES = 1 << 20
"""Least room that a recorder can be given."""

_NAME = "texts-"

_FILES = 8
"""Parts in which the room is taken, and the oldest texts given up."""

_WAITING = 64
"""Most texts that wait for the disk; further ones are not recorded."""


class Recorder:
    """Appends texts to files of one folder, on a thread of its own.

    It costs a generation nothing: :meth:`add` never waits, and a text that cannot be kept is only
    counted. The first failure of the disk ends the recording, with one line in the log.

    Files are this user's alone (mode 0600) and only appended to, a line for each text, so a process
    that is killed loses what it had not written yet and no more. Together they never take more than
    ``limit`` bytes: the oldest file goes first. A recorder belongs to one event loop.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        """Take a folder, made if need be.

        Args:
            folder: For this recorder alone; one that was there before is gone on with.
            limit: Most room for texts. Unit: bytes.

        Raises:
            ValueError: The limit is below 1 MiB.
            OSError: The folder cannot be made or written to, or another process records there.
        """
        if limit < LEAST_BYTES:
            raise ValueError(
                f"room for {limit} bytes of recorded texts, expected {LEAST_BYTES} or more"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._limit = folder, limit
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise OSError(
                f"another process records texts in {folder}: give each a folder of its own"
            ) from error
        self.recording = True
        """Whether texts are kept; false once the disk took no more."""
        self.recorded = 0
        """Texts that were kept."""
        self.lost = 0
        """Texts that were not: too long, too many at a time, or the disk took no more."""
        self._file: int | None = None
        self._size = 0
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter-recorder")
        try:
            self._next_file()
        except OSError:
            self._release()
            raise
        logger.info("recording texts", extra={"folder": str(folder), "limit_bytes": limit})

    def add(self, text: Callable[[], Recording]) -> None:
        """Keep a text soon, if there is room and time for it.

        ``text`` is called on the thread; what it raises ValueError for is not kept.
        """
        if not self.recording or self._waiting >= _WAITING:
            self.lost += 1
            return
        self._waiting += 1
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._write, text).add_done_callback(self._written)

    async def close(self) -> None:
        """End the thread, after all writes."""
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
            logger.error("no more texts are recorded", extra={"fault": str(error)})

    def _write(self, text: Callable[[], Recording]) -> bool:
        most = self._limit // _FILES
        try:
            line = text().to_json().encode() + b"\n"
        except ValueError:
            return False
        if len(line) > most or not self.recording:
            return False
        if self._size + len(line) > most:
            self._next_file()
        # One write: a line is whole, or the last one.
        assert self._file is not None, "opened"
        if os.write(self._file, line) != len(line):
            raise OSError(f"there is no room left in {self._folder}")
        self._size += len(line)
        return True

    def _next_file(self) -> None:
        """Begin a file, with room for it to fill."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        files = sorted(self._folder.glob(f"{_NAME}*.jsonl"))
        taken = sum(file.stat().st_size for file in files)
        for file in files:
            if taken + self._limit // _FILES <= self._limit:
                break
            taken -= file.stat().st_size
            file.unlink()
        path = self._folder / f"{_NAME}{time.time_ns():020}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
