"""Local services, named models and prompt files, for commands, benchmarks and tests. No torch."""

from paceline.harness.process import (
    JOIN_SECONDS,
    Kind,
    ProcessFailed,
    ServiceProcess,
    has_drafter,
    local_services,
    with_port,
)
from paceline.harness.prompts import PROMPT_FILE, read_prompts

__all__ = [
    "JOIN_SECONDS",
    "PROMPT_FILE",
    "Kind",
    "ProcessFailed",
    "ServiceProcess",
    "has_drafter",
    "local_services",
    "read_prompts",
    "with_port",
]
