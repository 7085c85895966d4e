"""What to load: a drafter as the command line names it, and the folders that may be loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.drafter.methods import path_options
from paceline.drafter.methods.base import LoadError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("none",)
_MOST_OPTIONS, _LONGEST_OPTION = 64, 4096


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter to load.

    Raises:
        LoadError: Name, version or method is not a plain word, or the name is reserved.
    """

    name: str
    """Name that clients ask for: letters, digits, dot, dash, underscore; not ``none``."""

    method: str
    folder: Path | None = None
    """Model folder (or record file of ``replay``); None for methods without weights."""

    options: dict[str, str] = field(default_factory=dict)
    version: str = ""
    """Empty: the registry numbers it."""

    def __post_init__(self) -> None:
        for what, word in (("name", self.name), ("version", self.version or "1")):
            if not _NAME.fullmatch(word) or word in _RESERVED:
                raise LoadError(
                    "INVALID_NAME",
                    f"{word[:80]!r} is not a {what} for a drafter: use letters, digits, '.', '-' "
                    "and '_', at most 64, starting with a letter or digit, and not 'none'",
                )
        if len(self.options) > _MOST_OPTIONS or any(
            len(text) > _LONGEST_OPTION for pair in self.options.items() for text in pair
        ):
            raise LoadError(
                "INVALID_OPTION",
                f"drafter {self.name!r} has {len(self.options)} options, expected at most "
                f"{_MOST_OPTIONS} of at most {_LONGEST_OPTION} characters",
            )
        if not self.method:
            raise LoadError("UNKNOWN_METHOD", f"drafter {self.name!r} names no method")

    @property
    def folders(self) -> list[Path]:
        """All folders it reads."""
        options = (self.options.get(name) for name in path_options(self.method))
        named = [Path(option) for option in options if option]
        return named if self.folder is None else [self.folder, *named]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Read ``[NAME=]METHOD[:DIR][,key=value...]``; without NAME the method is the name.

        A piece between commas that has no ``=`` belongs to what stands before it, so that
        ``lm:DIR,widths=4,4,2,max_nodes=10`` has the options ``widths=4,4,2`` and ``max_nodes=10``.

        Raises:
            LoadError: The text has another form.
        """
        pieces: list[str] = []
        for index, piece in enumerate(text.split(",")):
            if index == 0 or "=" in piece:
                pieces.append(piece)
            else:
                pieces[-1] += "," + piece
        head, options = pieces[0], {}
        for piece in pieces[1:]:
            key, _, value = piece.partition("=")
            if key in options:
                raise LoadError("INVALID_OPTION", f"option {key!r} stands twice in {text!r}")
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
        """The folder with all links resolved.

        Raises:
            LoadError: It lies below none of the roots, or there is nothing there.
        """
        try:
            found = folder.resolve()
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # too long, a zero byte, links in a ring
            raise LoadError(
                "FOLDER_MISSING", f"{str(folder)[:80]!r} is no path: {error}"
            ) from error
        if not any(found.is_relative_to(root) for root in self._roots):
            listed = ", ".join(map(str, self._roots)) or "none: this service was given no folder"
            raise LoadError(
                "FOLDER_NOT_ALLOWED",
                f"{str(folder)[:200]} is not below a folder that drafters may be loaded from "
                f"({listed}); move it there or start the service with another root",
            )
        try:
            there = found.exists()
        except OSError:  # such as a name that is too long
            there = False
        if not there:
            raise LoadError(
                "FOLDER_MISSING", f"there is no {str(folder)[:200]} on the drafter's machine"
            )
        return found
