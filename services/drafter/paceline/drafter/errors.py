"""The error of loading a drafter."""

from __future__ import annotations


class LoadError(Exception):
    """A drafter cannot be loaded: its method, folder, options or weights are invalid."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Stable upper-case name of the error."""
