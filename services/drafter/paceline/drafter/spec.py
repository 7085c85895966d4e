"""Drafter specifications, and the folders that drafters may be loaded from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import LoadError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("none", "local")
_MAX_OPTIONS, _MAX_OPTION_CHARS = 64, 4096


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter to load. Raises ``LoadError`` if name, version, method or options are malformed, or
    the name is reserved."""

    name: str  # name for clients: letters, digits, dot, dash, underscore; not ``none`` or ``local``
    method: str
    # Model folder, or a file where the method reads one; None for methods without weights.
    folder: Path | None = None
    options: dict[str, str] = field(default_factory=dict)
    version: str = ""  # empty: the registry numbers it

    def __post_init__(self) -> None:
        for what, word in (("name", self.name), ("version", self.version or "1")):
            if not _NAME.fullmatch(word) or word in _RESERVED:
                raise LoadError(
                    "INVALID_NAME",
                    f"{word[:80]!r} is not a valid drafter {what}: use letters, digits, '.', '-' "
                    "and '_', at most 64, starting with a letter or digit, and not 'none' or "
                    "'local'",
                )
        if len(self.options) > _MAX_OPTIONS or any(
            len(text) > _MAX_OPTION_CHARS for pair in self.options.items() for text in pair
        ):
            raise LoadError(
                "INVALID_OPTION",
                f"drafter {self.name!r} has {len(self.options)} options, expected at most "
                f"{_MAX_OPTIONS} of at most {_MAX_OPTION_CHARS} characters",
            )
        if not self.method:
            raise LoadError("UNKNOWN_METHOD", f"drafter {self.name!r} has no method; name one")

    @property
    def folders(self) -> list[Path]:
        options = (self.options.get(name) for name in method_class(self.method).path_options)
        named = [Path(option) for option in options if option]
        return named if self.folder is None else [self.folder, *named]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Read ``[NAME=]METHOD[:DIR][,key=value...]``; without NAME the method is the name.

        A part between commas without ``=`` continues the part before it:
        ``lm:DIR,widths=4,4,2,max_nodes=10`` has the options ``widths=4,4,2`` and ``max_nodes=10``.
        Raises ``LoadError`` if the text is malformed.
        """
        head, *parts = re.split(r",(?=[^,]*=)", text)
        options: dict[str, str] = {}
        for part in parts:
            key, _, value = part.partition("=")
            if key in options:
                raise LoadError("INVALID_OPTION", f"option {key!r} is given twice in {text!r}")
            options[key.strip()] = value
        name, equals, rest = head.partition("=")
        method, _, folder = (rest if equals else head).partition(":")
        return cls(
            name=name if equals else method,
            method=method,
            folder=Path(folder) if folder else None,
            options=options,
        )


class Roots:
    """The folders below which drafters may be loaded from. Immutable."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(dict.fromkeys(root.resolve() for root in roots))

    def check(self, folder: Path) -> Path:
        """Return a folder with all links resolved. Raises ``LoadError`` if it is not below a root,
        or does not exist."""
        try:
            resolved = folder.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a cycle of links
            raise LoadError(
                "FOLDER_MISSING", f"{str(folder)[:80]!r} is not a valid path: {error}"
            ) from error
        if not any(resolved.is_relative_to(root) for root in self._roots):
            listed = ", ".join(map(str, self._roots)) or "none: this service was given no folder"
            raise LoadError(
                "FOLDER_NOT_ALLOWED",
                f"{str(folder)[:200]} is not below a folder that drafters may be loaded from "
                f"({listed}); move it there or start the service with --root DIR",
            )
        if not os.path.exists(resolved):  # unlike Path.exists, False if the name is too long
            raise LoadError(
                "FOLDER_MISSING", f"there is no {str(folder)[:200]} on the drafter's machine"
            )
        return resolved
