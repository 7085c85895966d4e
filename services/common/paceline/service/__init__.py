"""Runtime shared by the gRPC services: lifecycle, health, drain, identity, errors and logs.

Imports no torch, except for :mod:`paceline.service.sampling`, which this package does not import.
"""

from paceline.service.identity import owner_of
from paceline.service.interceptor import ServiceError
from paceline.service.logs import configure_logging
from paceline.service.options import (
    OptionsError,
    ServerOptions,
    add_server_arguments,
)
from paceline.service.runtime import Gate, Service, check_address, run_server

__all__ = [
    "Gate",
    "OptionsError",
    "ServerOptions",
    "Service",
    "ServiceError",
    "add_server_arguments",
    "check_address",
    "configure_logging",
    "owner_of",
    "run_server",
]
