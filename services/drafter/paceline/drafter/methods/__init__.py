"""Drafting methods by name: this package's own, and those that other packages register.

An installed distribution registers a method by an entry point of the group ``paceline.methods``::

    [project.entry-points."paceline.methods"]
    mine = "my_package.my_module:MyDrafter"
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from paceline.drafter.methods.base import Drafter, LoadError

GROUP = "paceline.methods"  # group of entry points
# The order is that in which methods are asked whose a folder is: `lm` takes any model. Where no
# accepted length is noted, `paceline serve` prefers methods in this order.
_BUILT_IN = {
    "ngram": "paceline.drafter.methods.ngram:NgramDrafter",
    "selfspec": "paceline.drafter.methods.selfspec:SelfSpecDrafter",
    "longspec": "paceline.drafter.methods.longspec.drafter:LongSpecDrafter",
    "dspark": "paceline.drafter.methods.dspark.drafter:DSparkDrafter",
    "eagle3": "paceline.drafter.methods.eagle3.drafter:Eagle3Drafter",
    "mtp": "paceline.drafter.methods.mtp.drafter:MtpDrafter",
    "lm": "paceline.drafter.methods.lm:LmDrafter",
}


def _methods() -> dict[str, EntryPoint]:
    """Return all installed methods by name. A built-in name cannot be registered again."""
    more = {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in _BUILT_IN}
    return more | {name: EntryPoint(name, at, GROUP) for name, at in _BUILT_IN.items()}


def method_names() -> list[str]:
    """Return the names of all installed methods, those of other packages first."""
    return list(_methods())


def method_class(name: str) -> type[Drafter]:
    """Import a method. Nothing that other methods need is imported.

    Raises:
        LoadError: UNKNOWN_METHOD: no installed method has this name, or it is no :class:`Drafter`.
            METHOD_NOT_INSTALLED: it cannot be imported.
    """
    entry = _methods().get(name)
    if entry is None:
        known = ", ".join(sorted(method_names()))
        raise LoadError(
            "UNKNOWN_METHOD",
            f"unknown method {name!r}; known are {known}. A package adds a method by an entry "
            f"point of the group {GROUP}",
        )
    try:
        method = entry.load()
    except (ImportError, AttributeError) as error:
        needed = "pip install 'paceline[server]'" if name in _BUILT_IN else "install what it needs"
        raise LoadError(
            "METHOD_NOT_INSTALLED", f"method {name!r} cannot be imported ({error}); {needed}"
        ) from error
    if not (isinstance(method, type) and issubclass(method, Drafter)):
        raise LoadError(
            "UNKNOWN_METHOD", f"method {name!r} is {entry.value}, expected a subclass of Drafter"
        )
    return method
