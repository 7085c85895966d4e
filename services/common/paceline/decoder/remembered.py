"""Values that depend on files and versions, kept in the user's cache folder between starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_FORMAT = 4
_MAX_FILES = 256
_unwritable: set[Path] = set()  # cache folders of which this was said


def remembered(facts: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """Return what ``make`` returned for the same facts, now or in an earlier process: JSON.

    ``facts`` are all that it depends on, besides the version of transformers; each has a ``repr``
    that shows its value. What ``make`` raises is not stored.
    """
    file = cache_file("configs", (_FORMAT, version("transformers"), facts))
    with suppress(OSError, ValueError):  # it is not stored, or damaged
        value = json.loads(file.read_text(encoding="utf-8"))
        with suppress(OSError):
            os.utime(file)  # its last use
        return value
    _make_folder(file)  # and say here if it cannot be: `make` may do so in a child process
    value = make()
    store(file, value)
    return value


def cache_file(kind: str, facts: tuple[object, ...]) -> Path:
    """Return the file of a value that depends on ``facts``, in the cache folder for its kind."""
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return cache_folder(kind) / f"{key}.json"


def cache_folder(kind: str) -> Path:
    """Return the folder for some kind of files in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paceline", kind)


def store(file: Path, value: Any) -> None:
    """Write a value as JSON, and remove the files beside it whose last use is the longest ago, with
    their locks, beyond 256. A failure is logged."""
    fresh = file.with_suffix(f".{os.getpid()}")
    if not _make_folder(file):
        return
    try:
        fresh.write_text(json.dumps(value), encoding="utf-8")
        fresh.replace(file)
        files = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-_MAX_FILES]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
    except OSError as error:
        _complain(file, error)


def _make_folder(file: Path) -> bool:
    """Make the folder of a file in the cache; whether there is one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _complain(file, error)
        return False
    return True


def _complain(file: Path, error: OSError) -> None:
    """Say once that files of a cache folder are not stored."""
    folder = file.parent.parent
    level = logging.DEBUG if folder in _unwritable else logging.WARNING
    _unwritable.add(folder)
    _log.log(level, "%s cannot be written, so that each start takes longer: %s", folder, error)


def digest_of_sources(folder: Path) -> str:
    """Return the SHA-256 (hex) of the Python files in a folder and those below it.

    Those of kernels contain all that fixes the order in which these add: borders of attention's
    chunks, tiles of routed experts, launch options. A list of such constants would lack the next
    one. A changed comment changes the digest too; then two verifiers do not promise equal texts,
    although their bits are equal.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
