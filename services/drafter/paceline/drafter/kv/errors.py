"""Errors of reading the target's KV."""

from __future__ import annotations


class KvNotShared(Exception):
    """The KV of a cache cannot be read here; the message gives the reason."""


class VerifierUnreachable(KvNotShared):
    """The verifier cannot be reached, or does not answer in time."""


class KvGone(Exception):
    """The cache was released, or its verifier has ended: what was read must not be used."""
