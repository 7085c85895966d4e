"""OpenAI's HTTP interface to a verifier and a drafter. Needs no torch."""

from .options import ApiKey, GatewayOptions, read_keys
from .server import Gateway, run_gateway

__all__ = ["ApiKey", "Gateway", "GatewayOptions", "read_keys", "run_gateway"]
