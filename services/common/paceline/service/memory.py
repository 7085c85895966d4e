"""Memory of a process that lives for months."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim() -> None:
    """Give freed memory back to the machine.

    glibc keeps what lies between blocks in use: without this a service that loads model after model
    grows by the weights of several. Other C libraries have no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
