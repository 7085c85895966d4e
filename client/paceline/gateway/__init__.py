"""OpenAI's HTTP interface to a verifier and a drafter. Needs no torch."""

from .app import Gateway
from .options import GatewayOptions
from .server import run_gateway

__all__ = ["Gateway", "GatewayOptions", "run_gateway"]
