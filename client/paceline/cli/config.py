"""Config files of `paceline serve`, `paceline verifier` and `paceline drafter`.

A TOML file with the tables `[verifier]` and `[drafter]`, whose keys are the long names of those
commands' arguments. What is given on the command line wins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FLAG = "--config"
TABLES = {
    "serve": ("verifier", "drafter"),
    "verifier": ("verifier",),
    "drafter": ("drafter",),
}
"""Tables that a command reads. For `serve` the drafter's `load` is its own `--drafter`."""


class ConfigError(Exception):
    """A config file cannot be used; the message says why."""


def expand(argv: Sequence[str]) -> list[str]:
    """A command line with its `--config FILE` replaced by what the file says.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    command = next((word for word in argv if not word.startswith("-")), None)
    if command not in TABLES:
        return list(argv)
    begin = argv.index(command) + 1
    rest: list[str] = []
    file: str | None = None
    words = iter(argv[begin:])
    for word in words:
        if word == FLAG:
            file = next(words, None)
            if file is None:
                raise ConfigError(f"{FLAG} names no file")
        elif word.startswith(f"{FLAG}="):
            file = word.partition("=")[2]
        else:
            rest.append(word)
    if file is None:
        return list(argv)
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return [*argv[:begin], *_flags(command, _read(Path(file)), given), *rest]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    tables = {table for tables in TABLES.values() for table in tables}
    for name, table in found.items():
        if name not in tables or not isinstance(table, Mapping):
            raise ConfigError(
                f"{path} has {name!r}, expected only the tables {', '.join(sorted(tables))}"
            )
    return found


def _flags(command: str, found: Mapping[str, Any], given: set[str]) -> list[str]:
    """Arguments that stand in the file and not on the command line."""
    flags: list[str] = []
    for table in TABLES[command]:
        for key, value in found.get(table, {}).items():
            if command == "serve" and table == "drafter":
                if key != "load":
                    raise ConfigError(
                        f"[drafter] {key}: paceline serve takes only load from this table"
                    )
                key = "drafter"
            if f"--{key}" not in given:
                flags += _flag(key, value)
    return flags


def _flag(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) for each in values):
        raise ConfigError(f"{key} = {value!r}: expected a text, a number, true or a list of them")
    return [f"--{key}={each}" for each in values]
