"""The target's committed KV and hidden states, as drafters read them.

:class:`~paceline.drafter.kv.reader.KvReader` is the interface. Its sources: ``shared`` (POSIX
shared memory), ``cuda`` (CUDA IPC), ``remote`` (a delta cache over gRPC). The names below are
imported on use, because importing a method's options must import neither gRPC nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.drafter.kv.access import VerifierAccess
    from paceline.drafter.kv.errors import KvGone, KvNotShared
    from paceline.drafter.kv.exchange import KvExchange
    from paceline.drafter.kv.options import KvOptions

__all__ = ["KvExchange", "KvGone", "KvNotShared", "KvOptions", "VerifierAccess"]

_MODULES = {
    "KvExchange": "exchange",
    "KvGone": "errors",
    "KvNotShared": "errors",
    "KvOptions": "options",
    "VerifierAccess": "access",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
