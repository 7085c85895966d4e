"""Stopping a run between two steps instead of in the middle of one."""

import signal
from types import FrameType
from typing import Self


class Interrupts:
    """A context manager in which SIGINT and SIGTERM only set `seen`.

    It must be entered in the main thread: Python allows signal handlers in no other.
    """

    seen = False

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
