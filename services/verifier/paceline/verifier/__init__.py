"""The verifier: target model, KV caches, and acceptance of drafted tokens.

From the outside in: ``service`` builds and runs everything; ``rpc`` checks requests and writes
responses; ``store`` admits caches and keeps their leases; ``engine`` runs the model; ``scheduler``
chooses the nodes of each step and the node budgets; ``kv`` holds the memory of caches.

Imports torch when it is used, so that the command line can read the options first.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.verifier.options import VerifierOptions

if TYPE_CHECKING:
    from paceline.verifier.service import VerifierService, build_service

__all__ = ["VerifierOptions", "VerifierService", "build_service"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("paceline.verifier.service"), name)
