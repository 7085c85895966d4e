"""The target's committed KV and hidden states, as drafters read them.

:class:`~paceline.drafter.kv.reader.KvReader` is the interface. Its sources: ``shared`` (POSIX
shared memory), ``cuda`` (CUDA IPC), ``remote`` (a delta cache over gRPC). What is imported here
does not import torch; the sources do.
"""

from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.kv.options import KvOptions

__all__ = ["KvExchange", "KvGone", "KvNotShared", "KvOptions", "VerifierAccess"]
