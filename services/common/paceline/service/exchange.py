"""The Unix socket of a draft exchange, and the wait of a thread for sockets and other threads.

The verifier's engine thread and the drafter's drafting thread each run one :class:`Waiter` and read
their sockets themselves, so that a round needs no event loop. Linux only.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from contextlib import suppress

from paceline.service import limits

_MAX_WAIT = 3600.0
"""Longest wait with a limit: the kernel counts in milliseconds of 32 bits. Unit: seconds."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("=iII")  # process, user and group of a peer


def socket_address(path: str) -> str:
    """Return a Unix socket's address; a leading @ stands for an abstract name's zero byte."""
    return "\0" + path[1:] if path.startswith("@") else path


def request_files(path: str, read_grant: bytes, seconds: float) -> list[int]:
    """Ask a verifier at its Unix socket for the memory of a cache, over a connection of its own.
    Blocks for so many seconds at most. Raises ``OSError``: the verifier does not answer. Returns
    descriptors that the caller closes: of the cache's segment and, if its KV is on a GPU that
    passes memory so, of the pool; none: the verifier has no such cache."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(socket_address(path))
        connection.sendall(_LENGTH.pack(len(read_grant)) + read_grant)
        _, files, _, _ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
    return files


class PeerGone(Exception):
    """The peer closed the connection, broke the framing, or does not read."""


class FramedSocket:
    """Messages over a connected stream socket, each after its length. One thread uses it.

    No call blocks: what the kernel does not take is sent by later calls of :meth:`flush`.
    """

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        """Take over a connected socket. A peer that sends more than ``max_bytes`` in a message is
        disconnected."""
        connection.setblocking(False)
        self._socket = connection
        self._max_bytes = max_bytes
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """Return the process at the other end of a Unix socket; 0 if the system does not tell, or
        the process is not visible here."""
        if sys.platform != "linux":
            return 0
        ucred = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(ucred)[0]
        return pid

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or keep the rest of it for :meth:`flush`. Raises ``PeerGone``: the
        connection is closed, or too much waits to be sent."""
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        self.flush()
        if len(self._unsent) > limits.UNSENT_BYTES:
            raise PeerGone(f"the peer does not read: {len(self._unsent)} bytes wait for it")

    def flush(self) -> None:
        """Send as much as the kernel takes. Raises ``PeerGone``: the connection is closed."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGone(f"the connection broke: {error}") from error
            del self._unsent[:sent]

    @property
    def has_message(self) -> bool:
        """Whether a whole message was read and not received, or one that is too long."""
        length = self._next_length()
        if length is None:
            return False
        return length > self._max_bytes or len(self._received) >= _LENGTH.size + length

    def receive(self, max_messages: int = sys.maxsize) -> list[bytes]:
        """Return the messages that have come, at most so many, by one read and without a wait.
        Others are there at the next call: see ``has_message``. Raises ``PeerGone``: the connection
        is closed, or a message is too long."""
        ended = False
        if not self.has_message:
            try:
                part = self._socket.recv(limits.READ_BYTES)
                self._received += part
                ended = not part
            except BlockingIOError:
                pass
            except OSError as error:
                raise PeerGone(f"the connection broke: {error}") from error
        messages: list[bytes] = []
        start = 0
        while len(messages) < max_messages and (length := self._next_length(start)) is not None:
            if length > self._max_bytes:
                raise PeerGone(
                    f"the peer sent a message of {length} bytes, expected at most {self._max_bytes}"
                )
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]
        if ended and not messages:
            raise PeerGone("the peer closed the connection")
        return messages

    def _next_length(self, start: int = 0) -> int | None:
        """Return the length of the message that begins at a place of what was read."""
        if len(self._received) - start < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(self._received, start)[0]
        return length

    def close(self) -> None:
        self._socket.close()


class Waiter:
    """Waits for sockets and for other threads.

    :meth:`wake` may be called by any thread; all else by the thread that waits.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)

    def wake(self) -> None:
        """End the current wait, or the next one at once."""
        os.eventfd_write(self._event, 1)

    def add(self, descriptor: int) -> None:
        """Wait for a socket to become readable too."""
        self._poll.register(descriptor, select.POLLIN)

    def remove(self, descriptor: int) -> None:
        """No longer wait for a socket. Call it before the socket is closed."""
        self._poll.unregister(descriptor)

    def watch_writable(self, descriptor: int, *, writable: bool) -> None:
        """Wait for a socket to take more bytes too, or no longer."""
        self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if writable else 0))

    def wait(self, seconds: float | None) -> list[int]:
        """Wait at most ``seconds`` (None: for ever; 0: not at all), or an hour. Returns the
        descriptors that can be read, written or have failed."""
        milliseconds = None if seconds is None else max(0.0, min(seconds, _MAX_WAIT) * 1e3)
        ready = [descriptor for descriptor, _ in self._poll.poll(milliseconds)]
        if self._event in ready:
            ready.remove(self._event)
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return ready

    def close(self) -> None:
        """Free the descriptor. No thread may call :meth:`wake` afterwards."""
        os.close(self._event)
