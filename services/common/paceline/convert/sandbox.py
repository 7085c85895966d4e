"""Work on what a stranger has made, in a child process with bounds on memory and time."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import Popen
from threading import Lock
from time import monotonic
from typing import Any, Literal, TypeVar

import torch

from paceline.decoder.config import UnsupportedModelError

T = TypeVar("T")
Progress = Callable[[int, int], None]
_DONE, _FAILED, _REACHED, _LOGGED = "done", "failed", "reached", "logged"

# How a process with threads starts children: in a fork of it, a lock that another thread held stays
# locked for ever. None: as a new interpreter. A process that starts many may set "forkserver".
START_METHOD: Literal["forkserver"] | None = None


def run_in_child(
    work: Callable[[Progress], T],
    what: str,
    *,
    seconds: float,
    memory: int,
    progress: Progress = lambda count, total: None,
) -> T:
    """Return the result of work in a child process, whose logs become this process's.

    ``work`` is called with a function to say how far it is, and ``progress`` here with what it
    says. It and its result can be pickled; it finds one thread of the math library. ``what`` is
    path and work, for errors; ``memory`` the bytes it may take beside Python and its
    modules. Raises ``UnsupportedModelError`` if it took more than it may, or ended without a
    result, and what ``work`` raises.
    """
    if sys.platform != "linux":
        return work(progress)
    here, there = Pipe()
    with there:
        child = _start(there)
    deadline = monotonic() + seconds
    try:
        here.send((work, memory, dict(os.environ), logging.getLogger().getEffectiveLevel()))
        while here.poll(max(0.0, deadline - monotonic())):
            kind, value = here.recv()
            if kind == _REACHED:
                progress(*value)
            elif kind == _LOGGED:
                logging.getLogger(value.name).handle(value)
            elif kind == _FAILED:
                raise value
            else:
                result: T = value
                return result
        raise UnsupportedModelError(f"{what} takes more than {seconds:.0f} s")
    except (EOFError, ConnectionError):
        code = child.wait()
        end = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise UnsupportedModelError(
            f"{what} ended {end}: a file is damaged, or memory short"
        ) from None
    finally:
        here.close()
        child.kill()
        child.wait()


class _Forked:
    """A fork, with the methods of ``Popen``."""

    def __init__(self, method: str, there: Connection) -> None:
        self._process: Any = get_context(method).Process(target=_work, args=(there,))  # type: ignore[attr-defined]
        self._process.start()
        self.kill: Callable[[], None] = self._process.kill

    def wait(self) -> int:
        self._process.join()
        return int(self._process.exitcode)


def _start(there: Connection) -> _Forked | Popen[bytes]:
    """Start a child that reads from a connection what it does."""
    one_thread = len(os.listdir("/proc/self/task")) == 1
    if method := "fork" if one_thread else START_METHOD:
        return _Forked(method, there)
    file = there.fileno()
    # Python's own "spawn" would run the main module again.
    lines = f"import sys; sys.path[:] = {sys.path}; from {__name__} import _main; _main({file})"
    return Popen([sys.executable, "-c", lines], pass_fds=[file])


def _main(file: int) -> None:
    _work(Connection(file))


class _Logs(QueueHandler):
    """Sends records to the process that started this one."""

    def __init__(self, send: Callable[[tuple[str, Any]], None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send((_LOGGED, record))


def _work(sender: Connection) -> None:
    work, memory, environment, level = sender.recv()
    os.environ.clear()  # a fork server has the environment of its start
    os.environ.update(environment)
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + memory, hard))
    lock = Lock()

    def send(message: tuple[str, Any]) -> None:
        with lock:
            sender.send(message)

    root = logging.getLogger()
    root.handlers = [_Logs(send)]
    root.setLevel(level)
    try:
        message: tuple[str, Any] = _DONE, work(lambda *reached: send((_REACHED, reached)))
    except MemoryError:
        message = _FAILED, _too_large(memory)
    except Exception as error:  # whatever it is, the parent has to know
        short = "allocate memory" in str(error)  # as torch says it
        message = _FAILED, _too_large(memory) if short else error
    try:
        send(message)
    except Exception:  # of an error that cannot be sent
        with suppress(OSError):
            send((_FAILED, UnsupportedModelError(str(message[1]))))


def _too_large(memory: int) -> UnsupportedModelError:
    return UnsupportedModelError(f"to read it takes more than {memory / 1e9:.0f} GB of memory")


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0
