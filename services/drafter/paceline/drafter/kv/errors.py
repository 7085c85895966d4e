"""What can go wrong with the target's KV."""

from __future__ import annotations


class KvNotShared(Exception):
    """The KV of a cache cannot be mapped here; the message says why."""


class KvGone(Exception):
    """The cache was released, or its verifier died: what was read is of no use any more."""
