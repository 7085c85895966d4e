"""What commands share: errors that end them, and config files."""

from __future__ import annotations

import argparse
import os.path
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

CONFIG = "--config"
"""A TOML file with the tables `[verifier]`, `[drafter]` and `[gateway]`, whose keys are the long
names of those commands' arguments. Arguments on the command line override the file."""

TABLES = {
    "serve": ("verifier", "drafter", "gateway"),
    "verifier": ("verifier",),
    "drafter": ("drafter",),
    "gateway": ("gateway",),
}  # tables that a command reads


GIVEN = "_given"  # name of the `given_options` in parsed arguments


class CommandError(Exception):
    """Ends a command: `main` prints the message and returns `code`."""

    def __init__(self, message: object, code: int = 2) -> None:
        super().__init__(str(message))
        self.code = code  # exit code; 2 for bad arguments, 1 for a service that failed


@contextmanager
def exit_with(code: int, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into a CommandError with this exit code. That nobody reads the output is
    none of them: `main` ends the command quietly then."""
    try:
        yield
    except BrokenPipeError:
        raise
    except errors as error:
        raise CommandError(error, code) from error


def given_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """Return the options of a parser in a command line, as they are written there, by the names of
    their values in parsed arguments."""
    known = parser._option_string_actions
    words = (word.partition("=")[0] for word in takewhile("--".__ne__, argv))
    return {known[word].dest: word for word in words if word in known}


def added_by(add: Callable[[argparse.ArgumentParser], object]) -> set[str]:
    """Return the names of the values in parsed arguments that a function adds options for."""
    parser = argparse.ArgumentParser()
    add(parser)
    return set(vars(parser.parse_args([])))


def refuse_options(
    args: argparse.Namespace,
    why: str,
    names: Collection[str] | None = None,
    but: Collection[str] = (),
) -> None:
    """Refuse options of the command line that a mode of the command does not use: those whose
    values have these names, or, if `names` is None, all `but` these. `why` says when they have no
    effect. Raises CommandError if the command line has one."""
    given: dict[str, str] = getattr(args, GIVEN, {})
    unused = [
        flag for name, flag in given.items() if (names is None or name in names) and name not in but
    ]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        raise CommandError(f"{', '.join(unused)} {verb} no effect {why}")


def meant(word: str, known: Iterable[str]) -> str:
    """Return a question for the known word that was perhaps meant; empty if none is similar."""
    names = list(known)
    close = [name for name in names if name.startswith(word)] or get_close_matches(word, names, 1)
    return f"; did you mean {close[0]}?" if close else ""


def expand_config(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Replace `--config FILE` in a command line, which begins with the command's name, by the
    arguments in the file. Raises CommandError if it cannot be read, or has another table, key or
    value."""
    command, *rest = argv
    at = next((i for i, word in enumerate(rest) if word.partition("=")[0] == CONFIG), None)
    if command not in TABLES or at is None:
        return list(argv)
    file = rest.pop(at).partition("=")[2] or (rest.pop(at) if at < len(rest) else "")
    if not file:
        raise CommandError(f"{CONFIG} needs a file")
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return [
        command,
        *_config_arguments(command, Path(os.path.expanduser(file)), given, parser),
        *rest,
    ]


def _config_arguments(
    command: str, path: Path, given: set[str], parser: argparse.ArgumentParser
) -> Iterator[str]:
    """Yield arguments that are in the file and not among those given."""
    from paceline.service.files import read_text  # with gRPC, which --help does not need

    try:
        tables = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}") from error
    for name, table in tables.items():
        if name not in TABLES["serve"]:
            known = ", ".join(f"[{header}]" for header in TABLES["serve"])
            raise CommandError(
                f"{path} has {name!r}, expected only the tables {known}"
                + meant(name, TABLES["serve"])
            )
        if not isinstance(table, dict):
            raise CommandError(f"{path} has {name} = {table!r}, expected a table: [{name}]")
    for name in TABLES[command]:
        actions = _actions_of(command, name, parser)
        for key, value in tables.get(name, {}).items():
            try:
                flag, words = _argument(key, value, actions)
            except ValueError as error:
                raise CommandError(f"{path}: [{name}] {error}") from None
            if flag not in given:
                yield from words


def _actions_of(
    command: str, table: str, parser: argparse.ArgumentParser
) -> dict[str, argparse.Action]:
    """Return the arguments of a command by the keys of one of its tables. Those of `serve` that
    begin with the table's name have keys without it, as in the table's own command."""
    groups: dict[str, list[argparse.Action]] = {name: [] for name in TABLES[command]}
    for group in parser._action_groups:
        groups.get(str(group.title), groups[TABLES[command][0]]).extend(group._group_actions)
    actions = {
        flag.removeprefix("--"): action
        for action in groups[table]
        for flag in action.option_strings
        if flag.startswith("--") and flag not in (CONFIG, "--help")
    }
    if command == "serve":
        actions |= {
            key.removeprefix(f"{table}-"): action
            for key, action in actions.items()
            if key.startswith(f"{table}-")
        }
        if table == "drafter":
            actions["load"] = actions.pop("drafter")
    return actions


def _argument(
    key: str, value: Any, actions: Mapping[str, argparse.Action]
) -> tuple[str, list[str]]:
    """Return the argument of a key, and its words on the command line, whose values argparse
    checks. Raises ValueError if there is no such key, or it has a value of another kind."""
    action = actions.get(key) or actions.get(f"no-{key}")
    if action is None:
        raise ValueError(f"has no key {key!r}{meant(key, actions)}")
    flag = action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{key} = {value!r}: expected true or false")
        word = key if value else f"no-{key}"
        return flag, [f"--{word}"] if word in actions else []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, bool) or not all(isinstance(item, str | int | float) for item in values):
        raise ValueError(f"{key} = {value!r}: expected a text, a number or a list of them")
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        raise ValueError(f"{key} = {value!r}: expected one value, not a list")
    return flag, [f"{flag}={item}" for item in values]
