"""What can go wrong with the target's KV."""

from __future__ import annotations


class KvNotShared(Exception):
    """The KV of a cache cannot be read here; the message says why."""


class VerifierSilent(KvNotShared):
    """The verifier cannot be reached."""


class KvGone(Exception):
    """The cache was released, or its verifier died: what was read is of no use any more."""
