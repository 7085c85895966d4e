"""The `paceline` command: a table of sub-commands, each imported only when it is called."""

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from paceline.cli.config import ConfigError, expand


@dataclass(frozen=True)
class Command:
    """One sub-command.

    Its module has `add_arguments(parser)` and `run(args) -> int`, and imports what its extra
    installs inside functions or not at all.
    """

    name: str
    module: str
    help: str
    extra: str | None = None
    """Extra of the distribution it needs; None: the client alone is enough."""


COMMANDS: tuple[Command, ...] = (
    Command("serve", "paceline.cli.serve", "run a verifier and a drafter", "server"),
    Command("verifier", "paceline.cli.verifier", "run a verifier: the target model", "server"),
    Command("drafter", "paceline.cli.drafter", "run a drafter", "server"),
    Command("generate", "paceline.cli.generate", "generate text through running services"),
    Command("gateway", "paceline.cli.gateway", "serve OpenAI's HTTP interface", "gateway"),
    Command("trace", "paceline.cli.trace", "show where the time of rounds goes", "telemetry"),
    Command("drafters", "paceline.cli.drafters", "list, load, activate and unload drafters"),
    Command("health", "paceline.cli.health", "ask a service whether it serves", "server"),
    Command("doctor", "paceline.cli.doctor", "print what this machine and install offer"),
    Command("demo", "paceline.cli.demo", "start both services and watch them generate", "server"),
    Command(
        "verify-lossless",
        "paceline.cli.lossless",
        "prove that speculation changes no token of your texts",
        "server",
    ),
    Command(
        "calibrate",
        "paceline.cli.calibrate",
        "fit confidences to how often drafted tokens are accepted",
        "server",
    ),
    Command("tune", "paceline.cli.tune", "find a drafter's best settings here", "server"),
    Command("train", "paceline.cli.train", "train targets and drafters", "train"),
    Command("completion", "paceline.cli.completion", "print a script that completes commands"),
)
if find_spec("paceline.bench") is not None:  # in a source checkout, not in the wheel
    COMMANDS += (Command("bench", "paceline.bench.cli", "measure speed and resilience", "dev"),)

# Modules that only the extras install; anything else missing is a fault and shows its traceback.
_OF_EXTRAS = (
    *("accelerate", "aiohttp", "grpc_health", "grpc_reflection", "jinja2", "llguidance"),
    *(
        "numpy",
        "openai",
        "opentelemetry",
        "prometheus_client",
        "pydantic",
        "safetensors",
        "torch",
        "transformers",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `paceline` with `argv` (default: the process's own); the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    command = _command_of(argv)
    try:
        args = build_parser([] if command is None else [command]).parse_args(expand(argv))
        return int(args.run(args))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if command is None or command.extra is None or missing not in _OF_EXTRAS:
            raise
        print(
            f"paceline {command.name}: {missing} is not installed; this command needs\n"
            f"    pip install 'paceline[{command.extra}]'",
            file=sys.stderr,
        )
        return 2
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _command_of(argv: Sequence[str]) -> Command | None:
    name = next((word for word in argv if not word.startswith("-")), None)
    return next((command for command in COMMANDS if command.name == name), None)


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "not installed: run from its sources"


def build_parser(expanded: Collection[Command]) -> argparse.ArgumentParser:
    """The parser of all commands, those of `expanded` with their arguments."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Lossless speculative decoding as services: verifier, drafter, client.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        if command in expanded:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
