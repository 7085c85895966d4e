"""Local services, named models and prompt files, for commands, benchmarks and tests. No torch."""

from paceline.harness.process import Kind, ProcessFailed, ServiceProcess, local_services
from paceline.harness.prompts import PROMPT_FILE, read_prompts

__all__ = [
    "PROMPT_FILE",
    "Kind",
    "ProcessFailed",
    "ServiceProcess",
    "local_services",
    "read_prompts",
]
