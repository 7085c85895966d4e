"""What is kept of the owners who generated last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Owners(Generic[_T]):
    """A bounded table of owners by name."""

    def __init__(self, limit: int, make: Callable[[], _T]) -> None:
        """Keep at most ``limit`` owners; ``make`` makes what is kept of a new one."""
        self._limit = limit
        self._make = make
        self._kept: OrderedDict[str, _T] = OrderedDict()

    def of(self, name: str) -> _T:
        """Return the store of one owner, who then counts as the newest. Without a name ("") the
        store is a new one that is not kept."""
        store = self._kept.pop(name, None) or self._make()
        if name:
            self._kept[name] = store
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return store
