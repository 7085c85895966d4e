"""Drafting methods by name: those of this package, and those that other packages register.

An installed distribution registers a method by an entry point of the group ``paceline.methods``::

    [project.entry-points."paceline.methods"]
    mine = "my_package.my_module:MyDrafter"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from paceline.drafter.methods.base import Drafter, LoadError

GROUP = "paceline.methods"

_METHODS: dict[str, str] = {
    "ngram": "paceline.drafter.methods.ngram.drafter:NgramDrafter",
    "lm": "paceline.drafter.methods.lm.drafter:LmDrafter",
    "longspec": "paceline.drafter.methods.longspec.drafter:LongSpecDrafter",
    "dspark": "paceline.drafter.methods.dspark.drafter:DSparkDrafter",
    "selfspec": "paceline.drafter.methods.selfspec.drafter:SelfSpecDrafter",
    "replay": "paceline.drafter.methods.replay:ReplayDrafter",
}

CALIBRATION = "calibration"
"""Option of every method: a file of :mod:`paceline.drafter.calibration`."""


def method_names() -> list[str]:
    """Returns the names of all methods, sorted."""
    return sorted({*_METHODS, *entry_points(group=GROUP).names})


def path_options(name: str) -> tuple[str, ...]:
    """Returns the options of a method that name a file or folder, which must be below a root.

    Raises:
        LoadError: See :func:`method_class`.
    """
    return (CALIBRATION, *method_class(name).path_options)


def method_class(name: str) -> type[Drafter]:
    """Imports a method. Methods that are not loaded are not imported, nor what they need.

    Raises:
        LoadError: UNKNOWN_METHOD: no method has this name, or several distributions register it, or
            it is no :class:`Drafter`. METHOD_NOT_INSTALLED: it cannot be imported.
    """
    path = _METHODS.get(name) or _registered(name)
    module, _, attribute = path.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        needed = (
            "pip install 'paceline[server]'" if name in _METHODS else f"install what {path} needs"
        )
        raise LoadError(
            "METHOD_NOT_INSTALLED", f"method {name!r} cannot be imported ({error}); {needed}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise LoadError(
            "UNKNOWN_METHOD", f"method {name!r} is {path}, expected a subclass of Drafter"
        )
    return found


def _registered(name: str) -> str:
    """Import path of a method that another distribution registers."""
    paths = {point.value for point in entry_points(group=GROUP, name=name)}
    if not paths:
        raise LoadError(
            "UNKNOWN_METHOD",
            f"unknown method {name!r}; known are {', '.join(method_names())}. A package adds a "
            f"method by an entry point of the group {GROUP}",
        )
    if len(paths) > 1:
        raise LoadError(
            "UNKNOWN_METHOD",
            f"method {name!r} is registered as {' and as '.join(sorted(paths))}; uninstall all but "
            "one",
        )
    return paths.pop()
