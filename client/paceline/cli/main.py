"""The `paceline` command: a table of sub-commands, each imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from paceline.cli.command import GIVEN, CommandError, expand_config, given_options, meant
from paceline.cli.environment import drop_output, prepared, require_files

ALIASES = {"run": ("chat",), "pull": ("fetch",), "ps": ("drafters", "list")}
"""Names of commands that other tools have for the same."""

_ADDRESSES = (
    "host and port are one argument: --gateway-address 127.0.0.1:8000 of serve, --address of "
    "verifier, drafter and gateway, --verifier-address of generate and chat"
)

_PARSER = "_parser"  # name of the parser of a command in its parsed arguments

# Top-level modules that only extras install. Any other missing module is a bug.
_OF_EXTRAS = (
    *("accelerate", "aiohttp", "grpc_health", "grpc_reflection", "llguidance", "numpy"),
    *("openai", "opentelemetry", "prometheus_client", "pydantic", "safetensors", "torch"),
    "transformers",
)


def _user_path(text: str) -> Path:
    from paceline.service.files import user_path  # with gRPC, which --help does not need

    return user_path(text)


@dataclass(frozen=True)
class Command:
    """One sub-command.

    Its module defines `add_arguments(parser)` and `run(args) -> int`, or several commands with
    `add_NAME_arguments` and `run_NAME`. Packages of an extra are imported inside functions only.
    """

    name: str
    module: str
    help: str
    extra: str | None = None  # extra of the distribution that it needs; None: no extra


COMMANDS = (
    Command("fetch", "paceline.cli.fetch", "download a model by name"),
    Command("chat", "paceline.cli.chat", "hold a conversation in the terminal", "gateway"),
    Command("serve", "paceline.cli.serve", "run a verifier, a drafter and a gateway", "server"),
    Command("verifier", "paceline.cli.services", "run a verifier: the target model", "server"),
    Command("drafter", "paceline.cli.services", "run a drafter", "server"),
    Command("generate", "paceline.cli.generate", "generate text through running services"),
    Command("check", "paceline.cli.check", "generate the text of a receipt again", "server"),
    Command("trace", "paceline.cli.trace", "show the rounds of a text as a timeline"),
    Command("gateway", "paceline.cli.services", "serve OpenAI's HTTP interface", "gateway"),
    Command("compare", "paceline.cli.compare", "compare drafters with plain decoding", "gateway"),
    Command("drafters", "paceline.cli.drafters", "list, load, activate and unload drafters"),
    Command("convert", "paceline.cli.models", "pack a model into a folder", "server"),
    Command("models", "paceline.cli.models", "list and remove packed models", "server"),
    Command("health", "paceline.cli.connection", "check the health of a service", "server"),
    Command("doctor", "paceline.cli.doctor", "report on this machine and installation"),
    Command(
        "demo",
        "paceline.cli.compare",
        "compare speeds by prompt, with services of its own",
        "server,gateway",
    ),
    Command("train", "paceline.train.cli", "train drafters", "train"),
    Command("bench", "paceline.bench.cli", "measure speed and resilience", "dev"),
    Command("completion", "paceline.cli.main", "print a shell's completion script"),
)


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations, which would change their meaning with each new option. Its
    errors are one line and say what was perhaps meant."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})
        self.register("type", Path, _user_path)
        self.set_defaults(**{_PARSER: self})  # of nested ones, the innermost is left in the result

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument ([A-Z]+): invalid choice: '(.*?)'", message)
        if wrong is not None:
            kind, word = wrong.groups()
            names = [
                name
                for action in self._actions
                if action.metavar == kind
                for name in action.choices or ()
            ]
            message = f"there is no {kind.lower()} {word!r}{meant(word, names)}"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own hides that it cannot be written

    def refuse_unknown(self, argv: Sequence[str]) -> None:
        """End the command for an option that it does not have, before its value is taken for
        something else."""
        options = [word for word in itertools.takewhile("--".__ne__, argv) if word[:2] == "--"]
        known = self.options()
        if unknown := [word for word in options if word.partition("=")[0] not in known]:
            self.refuse(unknown)

    def options(self) -> set[str]:
        """Return long options of this parser and of its actions."""
        flags = {flag for flag in self._option_string_actions if flag.startswith("--")}
        for action in self._actions:
            nested = action.choices.values() if isinstance(action.choices, dict) else ()
            flags.update(*(parser.options() for parser in nested if isinstance(parser, _Parser)))
        return flags

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End the command for words that are no arguments of it."""
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        if not options:
            self.error(f"unexpected: {' '.join(words)}")
        similar = meant(options[0], sorted(self.options()))
        self.error(f"there is no option {options[0]}{similar}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `paceline` with `argv` (default: the process's); returns the exit code."""
    try:
        with prepared():
            return _main([*(sys.argv[1:] if argv is None else argv)])
    except BrokenPipeError:
        drop_output()
        return 128 + signal.SIGPIPE  # as of a program that the signal ends
    except OSError as error:
        drop_output()
        print(f"paceline: the output cannot be written: {error}", file=sys.stderr)
        return 1


def _main(argv: list[str]) -> int:
    if os.getpid() == 1:  # of a container: the kernel ends it by no signal that it does not handle
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    if argv and argv[0] in ALIASES:
        argv[:1] = ALIASES[argv[0]]
    command = _command_of(argv)
    try:
        for word in ("--port", "--host"):
            if any(argument.partition("=")[0] == word for argument in argv):
                raise CommandError(f"there is no {word}: {_ADDRESSES}", 2)
        if command is not None:
            require_files()
        parser = build_parser([] if command is None else [command])
        if command is not None and argv[0] == command.name:
            subparser = _parser_of(parser, command)
            subparser.refuse_unknown(argv)
            argv = expand_config(argv, subparser)
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            getattr(args, _PARSER).refuse(unknown)
        setattr(args, GIVEN, given_options(getattr(args, _PARSER), argv))
        return int(args.run(args))
    except CommandError as error:
        message, code = str(error), error.code
    except ModuleNotFoundError as error:
        message, code = _missing(command, error.name or ""), 2
        if not message:
            raise
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:  # of the machine: a folder that cannot be written, a full disk
        message, code = str(error), 1
    print(f"paceline {command.name if command else ''}: {message}", file=sys.stderr)
    return code


def build_parser(expanded: Collection[Command]) -> argparse.ArgumentParser:
    """Return the parser of all commands; those in `expanded` have their arguments.

    Among several, commands of a package that is not installed get no arguments.
    """
    parser = _Parser(
        prog="paceline",
        description="Lossless speculative decoding as services: verifier, drafter, client.",
        epilog="also: " + ", ".join(f"{name} ({' '.join(same)})" for name, same in ALIASES.items()),
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        if command in expanded:
            try:
                module = importlib.import_module(command.module)
                part = f"_{command.name}" if hasattr(module, f"run_{command.name}") else ""
                getattr(module, f"add{part}_arguments")(sub)
                sub.set_defaults(run=getattr(module, f"run{part}"))
            except ModuleNotFoundError as error:
                if len(expanded) == 1 or not _missing(command, error.name or ""):
                    raise
    return parser


def _parser_of(parser: argparse.ArgumentParser, command: Command) -> _Parser:
    (commands,) = (action for action in parser._actions if action.metavar == "COMMAND")
    subparser = dict(commands.choices or {})[command.name]
    assert isinstance(subparser, _Parser)
    return subparser


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=["bash", "zsh", "fish", "tcsh"],
        help='the shell that reads the script. bash: put `eval "$(paceline completion bash)"` '
        "into ~/.bashrc. fish: write the script to ~/.config/fish/completions/paceline.fish. zsh: "
        "write it to the file _paceline in a folder of $fpath. tcsh: source it in ~/.tcshrc",
    )


def run_completion(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(build_parser(COMMANDS), shell=args.shell))
    return 0


def _command_of(argv: Sequence[str]) -> Command | None:
    name = next((word for word in argv if not word.startswith("-")), None)
    return next((command for command in COMMANDS if command.name == name), None)


def _missing(command: Command | None, module: str) -> str:
    """Return what to do about a missing module; empty where that is not known."""
    if module == "paceline.bench":
        return "this command is not in the installed package: run it in a checkout of the source"
    name = module.partition(".")[0]
    if command is None or command.extra is None or name not in _OF_EXTRAS:
        return ""
    return f"{name} is not installed; run\n    pip install 'paceline[{command.extra}]'"


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "not installed: run from its sources"


if __name__ == "__main__":
    sys.exit(main())
