"""Command-line arguments from the fields of a dataclass."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

_ARGUMENT_TYPES = {bool, int, float, str, Path}
_SIZE_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def option(default: Any, help: str, **argument: Any) -> Any:
    """A field of a dataclass that is also a command-line argument.

    Args:
        default: Default of the field.
        help: Description. The default is added to it, unless it is None or described there.
        argument: More arguments of `ArgumentParser.add_argument`; `flag` is the name of the
            argument, if it is not that of the field.
    """
    return field(default=default, metadata={"help": help, **argument})


def add_options(group: argparse._ActionsContainer, options: type[Any]) -> None:
    """Add an argument for each `option` of a dataclass.

    Its type is that of the field. A boolean is a flag that turns the default around: `--NAME`, or
    `--no-NAME` where the default is true. An argument that is not given has the value None.
    """
    types = get_type_hints(options)
    for entry in fields(options):
        if "help" not in entry.metadata:
            continue
        name = _argument_of(entry)
        settings = {"default": None, "dest": name, **entry.metadata}
        settings.pop("flag", None)
        flag = name.replace("_", "-")
        (kind,) = {*get_args(types[entry.name]), types[entry.name]} & _ARGUMENT_TYPES
        if kind is bool and "action" not in settings:
            settings |= {"action": "store_const", "const": not entry.default}
            flag = f"no-{flag}" if entry.default else flag
        elif kind is not bool:
            settings.setdefault("type", kind)
            if entry.default not in (None, ()) and "default" not in settings["help"]:
                settings["help"] += f" (default: {entry.default})"
        group.add_argument(f"--{flag}", **settings)


def given_options(args: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """The options of a dataclass that are in parsed arguments of `add_options`."""
    entries = [entry for entry in fields(options) if "help" in entry.metadata]
    given = {entry.name: getattr(args, _argument_of(entry)) for entry in entries}
    return {name: value for name, value in given.items() if value is not None}


def to_words(args: argparse.Namespace, options: type[Any]) -> list[str]:
    """The command line of the options of a dataclass that are in parsed arguments."""
    names = [_argument_of(entry) for entry in fields(options) if "help" in entry.metadata]
    return words_of(args, names)


def words_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The command line of the named arguments, without those that are None."""
    words = []
    for name in names:
        value, flag = getattr(args, name), name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


def _argument_of(entry: Field[Any]) -> str:
    return str(entry.metadata.get("flag", entry.name))


def byte_count(text: str) -> int:
    """Parses a size such as `4096`, `512MiB` or `1.5GiB`; an argparse type. Unit: bytes.

    Raises:
        argparse.ArgumentTypeError: The text is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or int(float(match[1]) * factor) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, or a number with KiB, MiB, GiB or TiB"
        )
    return int(float(match[1]) * factor)
