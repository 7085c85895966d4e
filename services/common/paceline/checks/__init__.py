"""Checks of parameters: of generations, of connections, and of other options that are checked when
they are created. It imports nothing of the project, no numpy and no torch."""

from __future__ import annotations

import json
import operator
import reprlib
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, TypeVar

__all__ = [
    "Checked", "ParameterError", "as_json", "check_range", "checked", "exactly", "items", "require",
]  # fmt: skip

_T = TypeVar("_T", bool, int, float, str)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


class ParameterError(ValueError):
    """A parameter is of another type, or out of its range."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter  # name of the parameter

    @classmethod
    def unexpected(
        cls, parameter: str, expected: str, value: object, at: str = ""
    ) -> ParameterError:
        """Return the error of a value, or of its part `at`, such as "[3]"."""
        try:
            shown = _SHORT.repr(value)
        except Exception:  # of the value's own `__repr__`, or an int of thousands of digits
            shown = f"<{type(value).__name__}>"
        return cls(parameter, f"{parameter}{at} must be {expected}, not {shown}")


def exactly(value: object, kind: type[_T]) -> _T | None:
    """Return a value as a bool, int, float or str; None if it is none, or would change.

    Scalars of numpy and torch are taken. A bool is no number.
    """
    if type(value) is kind:
        return value
    try:
        scalar = getattr(value, "shape", ()) == ()
        is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
        if not scalar or is_bool != (kind is bool):
            return None
        convert: Any = operator.index if kind is int else kind
        converted: _T = convert(value)
        return converted if converted == value else None
    except Exception:  # whatever the conversion of an unknown type raises
        return None


def checked(
    parameter: str,
    value: object,
    kind: type[_T],
    expected: str,
    valid: Callable[[_T], bool] = lambda _: True,
    at: str = "",
) -> _T:
    """Return a value as `kind`, as of `exactly`, which `valid` says is in its range. Errors say
    what was `expected`, and of which part of the parameter (`at`, such as "[3]").

    Raises `ParameterError` for another type, a value out of range, or a text with half a surrogate
    pair, which UTF-8 cannot encode.
    """
    converted = exactly(value, kind)
    if converted is None or not valid(converted):
        raise ParameterError.unexpected(parameter, expected, value, at)
    if isinstance(converted, str) and not _encodable(converted):
        raise ParameterError.unexpected(parameter, f"{expected} that UTF-8 can encode", value, at)
    return converted


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ``ValueError`` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"option {name}={value} is out of range, expected {low:g} to {high:g}")


def require(parameter: str, value: object, kind: type | UnionType, expected: str) -> None:
    """Raises ParameterError if a value is not of a type."""
    if not isinstance(value, kind):
        raise ParameterError.unexpected(parameter, expected, value)


def items(parameter: str, value: object, expected: str, max_items: int) -> list[Any]:
    """Return the items of a sequence, or of an array or tensor of one dimension. Raises
    ``ParameterError``: it is not that (text and bytes are not), or has more than `max_items`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise ParameterError.unexpected(parameter, expected, value)
    try:
        too_many = len(value) > max_items
    except OverflowError:  # a range
        too_many = True
    if too_many:
        raise ParameterError.unexpected(parameter, f"{expected}, at most {max_items}", value)
    return list(value)


def as_json(parameter: str, value: object) -> str:
    """Return a value as JSON. Raises ParameterError if it cannot be written so."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{parameter} cannot be written as JSON: {error}"
        raise ParameterError(parameter, message) from None


class Checked:
    """A frozen dataclass that checks its fields when it is created."""

    def _take(
        self,
        parameter: str,
        kind: type[_T],
        expected: str,
        valid: Callable[[_T], bool] = lambda _: True,
        *,
        optional: bool = False,
    ) -> None:
        """Check a parameter, as of `checked`, and keep it as `kind`; None too, if `optional`."""
        value = getattr(self, parameter)
        if not (optional and value is None):
            self._keep(parameter, checked(parameter, value, kind, expected, valid))

    def _keep(self, parameter: str, value: object) -> None:
        object.__setattr__(self, parameter, value)


def _encodable(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
