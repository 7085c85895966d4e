"""Services as forks of a process that has imported them, which takes an interpreter seconds.

:mod:`paceline.harness` has this module in place of `subprocess`. Where a variable may be read while
something is imported, a service is an interpreter of its own.
"""

import atexit
import os
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

from programs import PACELINE

from paceline.cli.main import main
from paceline.harness import _run_forked
from paceline.kv.policies import kv_policies

__all__ = ["PIPE", "PRELOADED", "Popen", "TimeoutExpired"]

PRELOADED = ["paceline.drafter.service", "paceline.gateway", "paceline.verifier.service"]
_READ_LATE = {"PACELINE_TOKEN", "PYTHONPATH"}  # variables that no import reads
_TESTS = Path(__file__).parent


class ForkedService:
    """As much of `subprocess.Popen` as :class:`~paceline.harness.ServiceProcess` uses."""

    def __init__(self, words: list[str], log: str, env: dict[str, str]) -> None:
        context = get_context("forkserver")
        stdin, self.stdin = context.Pipe(duplex=False)
        path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        path += [folder for folder in sys.path if _TESTS not in Path(folder, "file").parents]
        self._process = context.Process(target=_run, args=(words, log, stdin, env, path))
        self._process.start()
        atexit.register(self.stdin.close)  # before it waits for those that are left
        stdin.close()
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise TimeoutExpired("paceline", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.poll() is None:
            os.kill(self.pid, number)


def Popen(command: list[str], **how: Any) -> "subprocess.Popen[bytes] | ForkedService":
    """Start a service; takes what `ServiceProcess` gives `subprocess.Popen`."""
    interpreter, log, env = [sys.executable, *PACELINE], how["stdout"], how["env"]
    changed = {name for name, value in env.items() if os.environ.get(name) != value}
    if log and not how["preexec_fn"] and command[:3] == interpreter and changed <= _READ_LATE:
        return ForkedService(command[3:], log.name, env)
    return subprocess.Popen(command, **how)


def _run(
    words: list[str], log: str, stdin: "Connection[Any, Any]", env: dict[str, str], path: list[str]
) -> None:
    os.setsid()
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, descriptor in enumerate((stdin.fileno(), written, written)):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    kv_policies.cache_clear()  # those of the path before
    _run_forked(main, words)
