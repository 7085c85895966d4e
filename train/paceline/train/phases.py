"""What a run does besides its steps: how far it is, and when its time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_EVERY = 10.0  # seconds between lines


class Phase:
    """Counts what is done of a phase, in lines for terminals and log files alike."""

    def __init__(self, name: str, total: int, done: int = 0, until: float = math.inf) -> None:
        """Begin; `done` of `total` were done before. `until` is on the clock `time.monotonic`."""
        self._name, self._total, self._until = name, total, until
        self._done = self._first = done
        self._began = self._said = time.monotonic()
        print(f"{name}: {done:,} of {total:,}", flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def over(self) -> bool:
        """Whether the time is over and something is done."""
        return self._done > 0 and self.late

    def add(self, count: int = 1) -> None:
        """Count what was done; every ten seconds and at the end, say so, with an estimate."""
        self._done += count
        now = time.monotonic()
        whole = self._done >= self._total
        if not whole and now < self._said + _EVERY and not self.over:
            return
        self._said = now
        line = f"{self._name}: {self._done:,} of {self._total:,}"
        left = (self._total - self._done) * (now - self._began) / (self._done - self._first)
        if self.over and not whole:
            line += ", where its share of --minutes is over"
        elif not whole:
            line += f", {min(left, self._until - now) / 60:.1f} minutes left"
        print(line, flush=True)

    def take(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, each counted once its user asks for the next, until the time is over."""
        for item in items:
            yield item
            self.add()
            if self.over:
                return
