"""The target's committed KV, read by drafters where the verifier left it.

:mod:`paceline.drafter.kv.shared` imports torch; the rest does not.
"""

from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.exchange import KvExchange

__all__ = ["KvExchange", "KvGone", "KvNotShared", "VerifierAccess"]
