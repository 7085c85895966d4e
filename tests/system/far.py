"""Two network namespaces with a bad link between them, and plain links to this process's own.

The bad link is a pair of TUN devices whose packets this process carries: it needs no kernel module
for delays and losses (netem), only leave to make namespaces and devices.
"""

import fcntl
import heapq
import os
import random
import re
import select
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

VERIFIER, DRAFTER = "10.213.0.2", "10.213.1.2"
"""Where clients reach the services; the drafter reaches the verifier there by the bad link."""

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000


@dataclass(frozen=True)
class Link:
    """What the bad link does to each packet, one way."""

    delay: float = 0.0
    """Seconds."""
    loss: float = 0.0
    """Share of packets."""
    rate: float = 1e9
    """Bytes a second."""
    queue: float = 0.2
    """Packets that would wait longer than this for their turn are dropped. Seconds."""


DOWN = Link(loss=1.0)


class NotPermitted(Exception):
    """This machine does not permit namespaces or devices."""


class FarApart:
    """The namespaces ``verifier`` and ``drafter``; ``link`` may be replaced at any time.

    Attributes:
        link: What the link does now.
        carried: Bytes that came through, both ways.
    """

    def __init__(self) -> None:
        self.link = Link()
        self.carried = 0
        self.verifier, self.drafter = f"pl{os.getpid()}v", f"pl{os.getpid()}d"
        self._ends: list[int] = []
        self._thread = threading.Thread(target=self._carry, name="bad-link", daemon=True)
        self._closing, self._wake = os.pipe()

    def under(self, namespace: str) -> list[str]:
        """What makes a command run in a namespace."""
        return ["ip", "netns", "exec", namespace]

    def __enter__(self) -> Self:
        try:
            _remove_orphans()
            for index, name in enumerate((self.verifier, self.drafter)):
                _ip(f"netns add {name}")
                _ip(f"-n {name} link set lo up")
                _ip(f"link add {name}0 type veth peer name {name}1 netns {name}")
                _ip(f"addr add 10.213.{index}.1/30 dev {name}0")
                _ip(f"-n {name} addr add 10.213.{index}.2/30 dev {name}1")
                _ip(f"link set {name}0 up")
                _ip(f"-n {name} link set {name}1 up")
                self._ends.append(_tun(f"{name}t"))
                _ip(f"link set {name}t netns {name}")
                _ip(f"-n {name} addr add 10.213.2.{index + 1}/30 dev {name}t")
                _ip(f"-n {name} link set {name}t up")
            _ip(f"-n {self.drafter} route add {VERIFIER}/32 via 10.213.2.1 src 10.213.2.2")
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            said = getattr(error, "stderr", "") or error
            raise NotPermitted(f"cannot make network namespaces and devices: {said}") from error
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._wake)
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        for name in (self.verifier, self.drafter):
            with suppress(OSError, subprocess.CalledProcessError):
                _ip(f"netns del {name}")

    def _carry(self) -> None:
        draws, count = random.Random(1), 0
        waiting: list[tuple[float, int, int, bytes]] = []
        free = dict.fromkeys(self._ends, 0.0)
        others = dict(zip(self._ends, reversed(self._ends), strict=True))
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, end, packet = heapq.heappop(waiting)
                self.carried += len(packet)
                with suppress(OSError):
                    os.write(end, packet)
            timeout = max(0.0, waiting[0][0] - now) if waiting else None
            ready, _, _ = select.select([*self._ends, self._closing], [], [], timeout)
            if self._closing in ready:
                return
            for end in ready:
                packet, link, now = os.read(end, 65536), self.link, time.monotonic()
                begin = max(now, free[end])
                if draws.random() < link.loss or begin - now > link.queue:
                    continue
                free[end] = begin + len(packet) / link.rate
                count += 1
                heapq.heappush(waiting, (free[end] + link.delay, count, others[end], packet))


def _remove_orphans() -> None:
    """Namespaces of processes that were killed: their addresses would be in the way."""
    for found in re.finditer(r"^pl([0-9]+)[vd]\b", _ip("netns list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{found[1]}"):
            _ip(f"netns del {found[0]}")


def _ip(arguments: str) -> str:
    command = ["ip", *arguments.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _tun(name: str) -> int:
    """A TUN device of this name; its packets are read and written here, wherever it is moved."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    try:
        request = struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER)
        fcntl.ioctl(file, _TUNSETIFF, request)
    except OSError:
        os.close(file)
        raise
    return file
