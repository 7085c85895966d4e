"""Typed options of a method, parsed from text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from paceline.drafter.methods.base import LoadError

Options = TypeVar("Options")


def parse_options(kind: type[Options], given: Mapping[str, str]) -> Options:
    """Fills the dataclass ``kind`` from text.

    Args:
        kind: A dataclass whose fields have defaults and the types int, float, str, bool
            (``true`` or ``false``) or tuple[int, ...] (numbers with commas). Its
            ``__post_init__`` raises ``ValueError`` for values out of range.
        given: Option name to value.

    Raises:
        LoadError: An option is unknown, or a value is invalid. The message of an unknown option
            lists the known ones.
    """
    types = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            listed = ", ".join(f"{f.name} (default {f.default})" for f in known.values())
            raise LoadError(
                "UNKNOWN_OPTION", f"unknown option {name!r}; known are {listed or 'none'}"
            )
        try:
            values[name] = _PARSERS[types[name]](text.strip())
        except ValueError as error:
            raise LoadError(
                "INVALID_OPTION", f"option {name}={text!r} is not a {_NAMES[types[name]]}"
            ) from error
    try:
        return kind(**values)
    except ValueError as error:
        raise LoadError("INVALID_OPTION", str(error)) from error


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ``ValueError`` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"option {name}={value} is out of range, expected {low:g} to {high:g}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"option {name}={value!r}: expected one of {', '.join(known)}")


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _parse_ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: _parse_bool,
    tuple[int, ...]: _parse_ints,
}
_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "truth value (true or false)",
    tuple[int, ...]: "list of whole numbers (such as 4,4,2)",
}
