"""The target's committed KV: read by drafters where the verifier left it, or copied in part.

:mod:`~paceline.drafter.kv.shared`, :mod:`~paceline.drafter.kv.followed` and what they use import
torch; the rest does not. The names below are imported on use, because importing a method's options
must not import gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.drafter.kv.access import VerifierAccess
    from paceline.drafter.kv.errors import KvGone, KvNotShared
    from paceline.drafter.kv.exchange import KvExchange
    from paceline.drafter.kv.wanted import KvOptions

__all__ = ["KvExchange", "KvGone", "KvNotShared", "KvOptions", "VerifierAccess"]

_MODULES = {
    "KvExchange": "exchange",
    "KvGone": "errors",
    "KvNotShared": "errors",
    "KvOptions": "wanted",
    "VerifierAccess": "access",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
