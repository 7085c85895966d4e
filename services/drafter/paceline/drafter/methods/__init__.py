"""The methods, by name. A new one is a file beside this and a line in the table."""

from __future__ import annotations

from importlib import import_module

from paceline.drafter.methods.base import Drafter, LoadError

_METHODS: dict[str, str] = {
    "ngram": "paceline.drafter.methods.ngram:NgramDrafter",
    "lm": "paceline.drafter.methods.lm:LmDrafter",
    "longspec": "paceline.drafter.methods.longspec:LongSpecDrafter",
    "dspark": "paceline.drafter.methods.dspark:DSparkDrafter",
    "selfspec": "paceline.drafter.methods.selfspec:SelfSpecDrafter",
    "replay": "paceline.drafter.methods.replay:ReplayDrafter",
}


CALIBRATION = "calibration"
"""Option that every method has: a file of :mod:`paceline.drafter.calibration`."""

_FOLDER_OPTIONS: dict[str, tuple[str, ...]] = {"longspec": ("target",), "dspark": ("target",)}


def method_names() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(_METHODS)


def folder_options(name: str) -> tuple[str, ...]:
    """Options of a method that name a folder or file: they are held to the roots, as its own is."""
    return (CALIBRATION, *_FOLDER_OPTIONS.get(name, ()))


def register_method(name: str, path: str) -> None:
    """Add a method from outside the package.

    Args:
        name: Its name; one that is taken already must have the same path.
        path: Import path ``module:Class`` of a :class:`Drafter`; imported when first loaded.

    Raises:
        ValueError: The name is taken, or the path has another form.
    """
    if path.count(":") != 1:
        raise ValueError(f"method path {path!r} must have the form module:Class")
    if _METHODS.setdefault(name, path) != path:
        raise ValueError(f"method {name!r} is {_METHODS[name]} already; choose another name")


def method_class(name: str) -> type[Drafter]:
    """The class of a method. Imports it, so that a service only pays for what it loads.

    Raises:
        LoadError: There is no such method, or what it needs is not installed.
    """
    if name not in _METHODS:
        raise LoadError(
            "UNKNOWN_METHOD", f"unknown method {name!r}; known are {', '.join(method_names())}"
        )
    module, _, attribute = _METHODS[name].partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise LoadError(
            "METHOD_NOT_INSTALLED",
            f"method {name!r} cannot be imported ({error}); pip install 'paceline[server]'",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise LoadError("UNKNOWN_METHOD", f"method {name!r} is no Drafter: {_METHODS[name]}")
    return found
