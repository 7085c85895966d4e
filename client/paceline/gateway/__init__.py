"""OpenAI's HTTP interface to a verifier and a drafter. Needs no torch."""

from .models import ManagedModels, OneModel
from .options import GatewayOptions
from .server import Gateway, run_gateway

__all__ = ["Gateway", "GatewayOptions", "ManagedModels", "OneModel", "run_gateway"]
