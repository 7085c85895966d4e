"""Work on what a stranger has made, in a child process with bounds on memory and time."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

import torch

from paceline.decoder.config import UnsupportedModelError

T = TypeVar("T")
Progress = Callable[[int, int], None]
_DONE, _FAILED, _REACHED = "done", "failed", "reached"


def run_in_child(
    work: Callable[[Progress], T],
    what: str,
    *,
    seconds: float,
    memory: int,
    progress: Progress = lambda count, total: None,
) -> T:
    """The result of work in a fork of this process.

    Args:
        work: Called with a function to say how far it is. It finds one thread of the math library.
        what: Path and work, for errors.
        seconds: Time that it may take.
        memory: Memory that it may take beside that of this process. Unit: bytes.
        progress: Called here with what it says.

    Raises:
        UnsupportedModelError: It took more than it may, or ended without a result.
        Exception: What ``work`` raises.
    """
    if sys.platform != "linux":
        return work(progress)
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(sender, work, memory))
    child.start()
    sender.close()
    deadline = monotonic() + seconds
    try:
        while receiver.poll(max(0.0, deadline - monotonic())):
            kind, value = receiver.recv()
            if kind == _REACHED:
                progress(*value)
            elif kind == _FAILED:
                raise value
            else:
                result: T = value
                return result
        raise UnsupportedModelError(f"{what} takes more than {seconds:.0f} s")
    except EOFError:
        child.join()
        raise UnsupportedModelError(
            f"{what} ended by signal {-(child.exitcode or 0)}: a file is damaged, or memory short"
        ) from None
    finally:
        receiver.close()
        child.kill()
        child.join()


def _work(sender: Connection, work: Callable[[Progress], Any], memory: int) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + memory, hard))
    lock = Lock()

    def say(count: int, total: int) -> None:
        with lock:
            sender.send((_REACHED, (count, total)))

    try:
        message: tuple[str, Any] = _DONE, work(say)
    except MemoryError:
        message = _FAILED, _too_large(memory)
    except Exception as error:  # whatever it is, the parent has to know
        short = "allocate memory" in str(error)  # as torch says it
        message = _FAILED, _too_large(memory) if short else error
    try:
        sender.send(message)
    except Exception:  # of an error that cannot be sent
        with suppress(OSError):
            sender.send((_FAILED, UnsupportedModelError(str(message[1]))))


def _too_large(memory: int) -> UnsupportedModelError:
    return UnsupportedModelError(f"to read it takes more than {memory / 1e9:.0f} GB of memory")


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0
