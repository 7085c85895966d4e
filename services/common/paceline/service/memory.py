"""Memory of long-running processes."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed memory between blocks in use, so a service that loads several models in turn
    would grow by the weights of some. Other C libraries have no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
