"""What the start of this process is busy with, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class Phases:
    """The phases of a start, one after the other. Any thread may read them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # time of each phase that has ended, in seconds
        self.current = ""  # the running phase, and how far it is; empty: there is none
        self.on_change: Callable[[str], None] = lambda current: None
        """Called with the running phase, and how far it is, whenever one of them changes."""
        self._name, self._since = "", monotonic()

    def begin(self, name: str) -> None:
        """End the running phase, and begin one, such as "reading the weights"; empty: none."""
        now = monotonic()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name = self.current = name
        self._since = now
        self.on_change(name)

    def reached(self, count: int, total: int) -> None:
        """Tell how far the running phase is."""
        self.current = f"{self._name}, {count} of {total}"
        self.on_change(self.current)

    def __str__(self) -> str:
        """Return the phases that took half a second or more, with their seconds."""
        long = [f"{name} {spent:.1f} s" for name, spent in self.seconds.items() if spent >= 0.5]
        return ", ".join(long)


phases = Phases()  # the phases of this process


def packing(count: int, total: int) -> None:
    """Tell, during a start, how many layers of a model are packed."""
    if phases.current:
        if count == 1:
            phases.begin("packing the model, once")
        phases.reached(count, total)
