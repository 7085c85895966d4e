"""Whether the process that made a segment still lives.

Process ids mean nothing between containers that share /dev/shm; a lock on the file does, and the
kernel drops it however its holder ends.
"""

from __future__ import annotations

import fcntl


def claim(file: int) -> None:
    """Own a new segment for as long as this file descriptor stays open."""
    fcntl.flock(file, fcntl.LOCK_EX)


def is_orphan(file: int) -> bool:
    """Whether nobody owns the segment of a file descriptor of one's own; any open mode will do.

    Asks by a shared lock, given back at once: askers do not get into each other's way, and while
    the owner lives nobody gets it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
