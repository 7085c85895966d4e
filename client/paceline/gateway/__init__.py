"""OpenAI's HTTP interface to a verifier and a drafter. Needs no torch."""

from .app import Gateway
from .keys import ApiKey, read_keys
from .options import GatewayOptions
from .server import run_gateway

__all__ = ["ApiKey", "Gateway", "GatewayOptions", "read_keys", "run_gateway"]
