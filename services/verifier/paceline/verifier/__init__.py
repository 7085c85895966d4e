"""The verifier: target model, KV caches, and acceptance of drafted tokens."""

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
