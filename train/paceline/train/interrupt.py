"""Stopping a run between two steps instead of in the middle of one."""

import signal
from types import FrameType, TracebackType


class Interrupts:
    """While entered, SIGINT and SIGTERM only set `seen`; the old handlers come back after.

    Must be entered in the main thread, as Python allows signal handlers nowhere else.
    """

    seen = False

    def __enter__(self) -> "Interrupts":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
