"""The target's committed KV: read by drafters where the verifier left it, or copied in part.

:mod:`~paceline.drafter.kv.shared`, :mod:`~paceline.drafter.kv.followed` and what they use import
torch; the rest does not.
"""

from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.kv.wanted import KvOptions

__all__ = ["KvExchange", "KvGone", "KvNotShared", "KvOptions", "VerifierAccess"]
