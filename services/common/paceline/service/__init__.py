"""Runtime shared by the gRPC services: lifecycle, health, drain, identity, errors and logs.

Imports no torch, except for :mod:`paceline.service.sampling`, which this package does not import.
"""

from paceline.service.errors import ServiceError
from paceline.service.gate import Gate
from paceline.service.identity import owner_of
from paceline.service.logs import configure_logging
from paceline.service.options import (
    SERVER_ARGUMENTS,
    OptionsError,
    ServerOptions,
    add_server_arguments,
)
from paceline.service.runtime import Service, run_server

__all__ = [
    "SERVER_ARGUMENTS",
    "Gate",
    "OptionsError",
    "ServerOptions",
    "Service",
    "ServiceError",
    "add_server_arguments",
    "configure_logging",
    "owner_of",
    "run_server",
]
