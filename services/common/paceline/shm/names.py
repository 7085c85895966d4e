"""Where segments are, and what they are called."""

from __future__ import annotations

import re
from pathlib import Path

SHM = Path("/dev/shm")
PREFIX = "paceline-"

_NAME = re.compile(rf"{PREFIX}[0-9]{{1,20}}-[0-9]{{1,20}}-[0-9a-f]{{16}}")


def segment_path(name: str) -> Path:
    """The file of a segment: ``paceline-<pid>-<process start in ticks>-<16 hex digits>``.

    Raises:
        ValueError: It is no name of a segment. So a name from elsewhere leads to no other file.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name of a KV segment")
    return SHM / name
