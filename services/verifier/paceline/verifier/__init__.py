"""The verifier: target model, KV caches, and acceptance of drafted tokens."""

from paceline.verifier.kv_exchange import KvExchangeServicer
from paceline.verifier.options import VerifierOptions
from paceline.verifier.service import VerifierService, build_service
from paceline.verifier.servicer import VerifierServicer

__all__ = [
    "KvExchangeServicer",
    "VerifierOptions",
    "VerifierService",
    "VerifierServicer",
    "build_service",
]
