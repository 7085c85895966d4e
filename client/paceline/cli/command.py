"""What commands share: errors that end them, config files, and output."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.client import Chunk


class CommandError(Exception):
    """Ends a command: `main` prints the message and returns `code`.

    Attributes:
        code: Exit code; 2 for bad arguments, 1 for a service that failed.
    """

    def __init__(self, message: object, code: int = 2) -> None:
        super().__init__(str(message))
        self.code = code


@contextmanager
def exit_with(code: int, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into a CommandError with this exit code."""
    try:
        yield
    except errors as error:
        raise CommandError(error, code) from error


CONFIG = "--config"
"""A TOML file with the tables `[verifier]` and `[drafter]`, whose keys are the long names of those
commands' arguments. Arguments on the command line override the file."""
TABLES = {"serve": ("verifier", "drafter"), "verifier": ("verifier",), "drafter": ("drafter",)}
"""Tables that a command reads. For `serve` the drafter's `load` becomes `--drafter`."""


def expand_config(argv: Sequence[str]) -> list[str]:
    """Replaces `--config FILE` in a command line by the arguments in the file. Raises CommandError:
    the file cannot be read or is not a config file."""
    command = next((word for word in argv if not word.startswith("-")), None)
    if command not in TABLES:
        return list(argv)
    begin = argv.index(command) + 1
    rest = list(argv[begin:])
    at = next((i for i, word in enumerate(rest) if word.partition("=")[0] == CONFIG), None)
    if at is None:
        return list(argv)
    file = rest.pop(at).partition("=")[2] or (rest.pop(at) if at < len(rest) else "")
    if not file:
        raise CommandError(f"{CONFIG} needs a file")
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return [*argv[:begin], *_config_arguments(command, Path(file), given), *rest]


def _config_arguments(command: str, path: Path, given: set[str]) -> Iterator[str]:
    """Arguments that are in the file and not among those given."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}") from error
    for name, table in tables.items():
        if name not in ("verifier", "drafter") or not isinstance(table, dict):
            raise CommandError(f"{path} has {name!r}, expected only the tables verifier, drafter")
    for name in TABLES[command]:
        for key, value in tables.get(name, {}).items():
            if (command, name) == ("serve", "drafter"):
                if key != "load":
                    raise CommandError(f"[drafter] {key}: paceline serve reads only load from it")
                key = "drafter"
            if f"--{key}" not in given:
                yield from _argument(key, value)


def _argument(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) for each in values):
        raise CommandError(f"{key} = {value!r}: expected a text, a number, true or a list of them")
    return [f"--{key}={each}" for each in values]


def print_chunk(console: Console, chunk: Chunk, style: str) -> None:
    """Print the text of a chunk, accepted drafted tokens in `style`."""
    pairs = zip(chunk.pieces, chunk.proposed_by, strict=False)
    for proposer, pieces in groupby(pairs, key=itemgetter(1)):
        text = "".join(piece for piece, _ in pieces)
        drafted = style if proposer == "drafter" else None
        console.out(text, style=drafted, highlight=False, end="")
