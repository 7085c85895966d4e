"""Errors of loading a drafter, and of reading the target's KV."""

from __future__ import annotations


class LoadError(Exception):
    """A drafter cannot be loaded: its method, folder, options or weights are invalid."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Stable upper-case name of the error."""


class KvNotShared(Exception):
    """The KV of a cache cannot be read here; the message gives the reason."""


class VerifierUnreachable(KvNotShared):
    """The verifier cannot be reached, or does not answer in time."""


class KvGone(Exception):
    """The cache was released, or its verifier has ended: what was read must not be used."""
