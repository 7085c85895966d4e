"""Keeps the connections of a server few: beyond a number, those that nobody uses make room."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.service import limits

_INFO = struct.Struct("=44xI4xI")
"""Of Linux's tcp_info: when data was last sent, and last received. Unit: milliseconds ago."""
_DESCRIPTORS = "/proc/self/fd"
_LINUX = sys.platform == "linux"


def max_connections() -> tuple[int, int]:
    """Connections beyond which those that nobody uses are closed, and beyond which none is taken.
    Both leave most of the files that may be open to caches."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(limits.CONNECTIONS, max(1, files // 8)), max(1, files // 4)


class ServerConnections:
    """The connections of a server that listens on TCP. Used on one event loop.

    Servers do not tell which connections they have, and gRPC closes none to take another: they are
    found among the process's files and shut down, as if their peers had. Of Unix sockets, which are
    for one user, there is no limit but the number of files, nor where the system is not Linux.
    """

    def __init__(self) -> None:
        self._calls = Counter[int]()

    @contextmanager
    def in_call(self, port: int) -> Iterator[None]:
        """In the body a call from this port is in flight: its connection is used."""
        self._calls[port] += 1
        try:
            yield
        finally:
            self._calls[port] -= 1
            if not self._calls[port]:
                del self._calls[port]

    async def keep_few(self, address: str) -> None:
        """Close what is too many, again and again; ``address`` is where the server listens."""
        port = address.rpartition(":")[2]
        while port.isdecimal() and _LINUX:
            await asyncio.sleep(limits.CONNECTIONS_SECONDS)
            self._close_unused(int(port), max_connections()[0])

    def _close_unused(self, port: int, max_open: int) -> None:
        """Close connections at ``port`` until ``max_open`` are left: those without a call first,
        the one first over which nothing has come or gone for the longest time."""
        descriptors = os.listdir(_DESCRIPTORS)
        if len(descriptors) <= max_open:
            return
        connections = []
        for descriptor in map(int, descriptors):
            if (use := self._last_used(descriptor, port)) is not None:
                connections.append((*use, descriptor))
        connections.sort()
        for _, _, peer, descriptor in connections[: max(0, len(connections) - max_open)]:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername()[1] == peer:  # else another one has its number now
                    connection.shutdown(socket.SHUT_RDWR)

    def _last_used(self, descriptor: int, port: int) -> tuple[bool, int, int] | None:
        """Return whether a connection at ``port`` has a call, minus the milliseconds since its last
        byte, and its peer's port; None: the descriptor is not one."""
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return None
        try:
            if connection.family == socket.AF_UNIX or connection.getsockname()[1] != port:
                return None
            peer = connection.getpeername()[1]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            return peer in self._calls, -min(_INFO.unpack(info)), peer
        except (OSError, struct.error):  # a socket that listens, or that has just been closed
            return None
        finally:
            connection.detach()
