"""Runtime shared by the gRPC services: lifecycle, health, drain, identity, errors and logs.

Imports no torch.
"""

from paceline.service.interceptor import Gate, ServiceError, owner_of, user_of
from paceline.service.options import OptionsError, ServerOptions, add_server_arguments
from paceline.service.runtime import Service, check_address, configure_logging, run_server

__all__ = [
    "Gate", "OptionsError", "ServerOptions", "Service", "ServiceError", "add_server_arguments",
    "check_address", "configure_logging", "owner_of", "run_server", "user_of",
]  # fmt: skip
