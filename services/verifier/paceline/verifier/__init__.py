"""The verifier: target model, KV caches, and acceptance of drafted tokens.

From the outside in: ``service`` builds and runs everything; ``rpc`` checks requests and writes
responses; ``store`` admits caches and keeps their leases; ``engine`` runs the model; ``scheduler``
chooses the nodes of each step and the node budgets; ``kv`` holds the memory of caches.
"""

from paceline.verifier.options import VerifierOptions
from paceline.verifier.rpc.kv_exchange import KvExchangeServicer
from paceline.verifier.rpc.servicer import VerifierServicer
from paceline.verifier.service import VerifierService, build_service

__all__ = [
    "KvExchangeServicer",
    "VerifierOptions",
    "VerifierService",
    "VerifierServicer",
    "build_service",
]
