"""The methods, by name. A new one is a file beside this and a line in the table."""

from __future__ import annotations

import importlib.util
import inspect
from importlib import import_module
from pathlib import Path

from paceline.drafter.methods.base import Drafter, LoadError

_METHODS: dict[str, str | type[Drafter]] = {
    "ngram": "paceline.drafter.methods.ngram:NgramDrafter",
    "lm": "paceline.drafter.methods.lm:LmDrafter",
    "replay": "paceline.drafter.methods.replay:ReplayDrafter",
}


def method_names() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(_METHODS)


def register_method(kind: type[Drafter]) -> None:
    """Add a method from outside the package, under its ``method`` name.

    Raises:
        LoadError: The name is taken by another class.
    """
    known = _METHODS.setdefault(kind.method, kind)
    if known is not kind:
        raise LoadError(
            "METHOD_TAKEN", f"there is a method {kind.method!r} already; choose another name"
        )


def register_methods_of(path: Path) -> None:
    """Run a Python file and add every :class:`Drafter` with a ``method`` name that it defines.

    Raises:
        LoadError: The file cannot be run, defines no method, or one whose name is taken.
    """
    spec = importlib.util.spec_from_file_location(f"paceline_test_methods_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise LoadError("METHOD_NOT_INSTALLED", f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise LoadError("METHOD_NOT_INSTALLED", f"cannot run {path}: {error!r}") from error
    found = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Drafter) and kind.__module__ == spec.name and hasattr(kind, "method")
    ]
    if not found:
        raise LoadError("METHOD_NOT_INSTALLED", f"{path} defines no Drafter with a method name")
    for kind in found:
        register_method(kind)


def method_class(name: str) -> type[Drafter]:
    """The class of a method. Imports it, so that a service only pays for what it loads.

    Raises:
        LoadError: There is no such method, or what it needs is not installed.
    """
    known = _METHODS.get(name)
    if known is None:
        raise LoadError(
            "UNKNOWN_METHOD",
            f"unknown method {name[:80]!r}; known are {', '.join(method_names())}",
        )
    if not isinstance(known, str):
        return known
    module, _, attribute = known.partition(":")
    try:
        found: type[Drafter] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise LoadError(
            "METHOD_NOT_INSTALLED",
            f"method {name!r} cannot be imported ({error}); pip install 'paceline[server]'",
        ) from error
    return found
