"""The new workload: pieces of an installed package's files, parted by file."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.bench.texts import Text

LENGTH = 256
"""Tokens of a prompt."""

_SIZES = (4_000, 90_000)  # bytes of a file
_HELDOUT = 8  # of so many files one is only measured on


@dataclass(frozen=True)
class Workload:
    """Prompts from files of two groups, none in both."""

    package: str
    traffic: list[Text]
    """What clients ask while texts are recorded, and during the trial."""
    heldout: list[Text]
    """What is measured on."""


def of_package(name: str, files: str, target: Path, traffic: int, heldout: int) -> Workload:
    """So many prompts of each group from files of a name like `files`, each from another place.

    Raises ValueError where the package is not installed, or a model trained on the standard library
    would have seen it.
    """
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders or "site-packages" not in Path(folders[0]).parts:
        raise ValueError(f"{name!r} is no package in site-packages: install it or name another")
    root = Path(folders[0])
    found = sorted(
        (path for path in root.rglob(files) if _SIZES[0] <= path.stat().st_size <= _SIZES[1]),
        key=lambda path: _digest(path.relative_to(root)),
    )
    held = [path for path in found if _digest(path.relative_to(root))[0] % _HELDOUT == 0]
    seen = [path for path in found if path not in held]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    return Workload(
        name,
        list(itertools.islice(_pieces(seen, root, tokenizer, "traffic"), traffic)),
        list(itertools.islice(_pieces(held, root, tokenizer, "heldout"), heldout)),
    )


def _pieces(paths: list[Path], root: Path, tokenizer: Tokenizer, group: str) -> Iterator[Text]:
    """One piece of each file after the other, and then the next of each."""
    for number in itertools.count():
        fitting = 0
        for path in paths:
            ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids
            # Not from the very beginning: licences would be most of it.
            start = LENGTH // 2 + number * LENGTH
            if start + LENGTH <= len(ids):
                fitting += 1
                file = path.relative_to(root).as_posix()
                yield Text(group, file, ids[start : start + LENGTH])
        if not fitting:
            return


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.as_posix().encode()).digest()
