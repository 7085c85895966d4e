"""Descriptors that a test opens, apart from those that earlier tests left."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

MEMORY = "/memfd:"


def open_files(prefix: str) -> int:
    """Return how many descriptors of this process are of files whose name starts so.

    Sockets and pipes have no such name: loops and processes of earlier tests close theirs whenever
    they are collected.
    """
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(prefix)
    return count


def memory_files() -> int:
    """Return how many memory files are open once garbage is collected."""
    gc.collect()
    return open_files(MEMORY)
