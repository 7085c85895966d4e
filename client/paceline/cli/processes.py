"""Service processes as context managers, for demo, benchmarks, tests and scripts. Torch-free."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

Kind = Literal["verifier", "drafter", "gateway"]

_POLL_SECONDS = 0.01
_LOG_TAIL_BYTES = 8192


class ProcessFailed(RuntimeError):
    """A service process did not get ready or died; the message has the end of its log."""


class ServiceProcess:
    """One `paceline verifier`, `paceline drafter` or `paceline gateway` process.

    A context manager, plain and async: it enters when the service answers calls, and on leaving
    stops the process whatever happened. The process also stops when this one dies in any way: it
    watches a pipe that only this one holds.

    Args:
        kind: which of them.
        arguments: of that command, such as `["--target", "models/demo/target"]`; `--address`,
            `--ready-file` and `--stop-with-stdin` are added.
        address: where to listen; port 0 takes any free one.
        environment: variables over those of this process.
        wrapper: command that runs it, such as `unshare` and its arguments; must exec it.
        show_log: let its log through to this stderr instead of keeping it.
        ready_seconds: how long it may take to get ready.
    """

    def __init__(
        self,
        kind: Kind,
        arguments: Sequence[str] = (),
        *,
        address: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        show_log: bool = False,
        ready_seconds: float = 120.0,
    ) -> None:
        self.kind = kind
        self.arguments = tuple(arguments)
        self.environment = dict(environment or {})
        self._wrapper = tuple(wrapper)
        self._wanted_address = address
        self._bound_address: str | None = None
        self._show_log = show_log
        self._ready_seconds = ready_seconds
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_deadline = 0.0

    @property
    def address(self) -> str:
        """Bound address; known once it was ready, and kept over restarts."""
        if self._bound_address is None:
            raise RuntimeError(f"the {self.kind} has not been ready yet: start it first")
        return self._bound_address

    @property
    def pid(self) -> int:
        """Process id of the running or last process."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._started().poll()

    def start(self) -> Self:
        """Spawn and wait until it answers calls.

        Raises:
            ProcessFailed: if it dies before, or takes longer than `ready_seconds`.
        """
        self.spawn()
        self.wait_ready()
        return self

    def spawn(self) -> None:
        """Start the process, where it listened before if it did, and return at once."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"the {self.kind} runs already")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"paceline-{self.kind}-"))
        self._ready_file.unlink(missing_ok=True)
        command = [
            *self._wrapper,
            *(sys.executable, "-m", "paceline.cli.main", self.kind, *self.arguments),
            *("--address", self._bound_address or self._wanted_address),
            *("--ready-file", str(self._ready_file), "--stop-with-stdin"),
        ]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=None if self._show_log else log,
                stderr=None if self._show_log else log,
                env={**os.environ, **self.environment},
                # Its own session: Ctrl-C in a terminal reaches this process alone, which then
                # decides, and not the child a second time.
                start_new_session=True,
            )
        self._ready_deadline = time.monotonic() + self._ready_seconds

    def wait_ready(self) -> None:
        """Wait until the spawned process answers calls; stops it if it does not.

        Raises:
            ProcessFailed: as `start`.
        """
        while not self.poll_ready():
            time.sleep(_POLL_SECONDS)

    def poll_ready(self) -> bool:
        """Whether the spawned process answers calls by now.

        Raises:
            ProcessFailed: as `start`.
        """
        if self._ready_file.exists():
            self._bound_address = self._ready_file.read_text(encoding="utf-8")
            return True
        if self.returncode is not None:
            raise self._failed(f"ended with code {self.returncode} before it was ready")
        if time.monotonic() > self._ready_deadline:
            self.kill()
            raise self._failed(f"was not ready within {self._ready_seconds:g} s")
        return False

    def restart_same_address(self) -> None:
        """Start again, after it died or was killed, where its clients look for it.

        Raises:
            ProcessFailed: as `start`.
        """
        if self._bound_address is None:
            raise RuntimeError(f"the {self.kind} has no address yet: start it first")
        self.start()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        self._started().send_signal(number)

    def terminate(self, timeout: float = 60.0) -> int:
        """SIGTERM, wait for the drain, and SIGKILL if it takes longer than `timeout` seconds.

        Returns:
            The exit code: 0 for a clean drain.
        """
        process = self._started()
        process.terminate()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._close_pipe()
        return code

    def kill(self) -> None:
        """SIGKILL: the death without any clean-up."""
        process = self._started()
        process.kill()
        process.wait()
        self._close_pipe()

    def stop(self) -> None:
        """Stop it if it runs, and remove its log and ready file. May be called again."""
        if self._process is not None:
            self.terminate()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines it logged; empty with `show_log` and after `stop`."""
        if self._folder is None or not self._log_file.exists():
            return ""
        with self._log_file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        try:
            return await asyncio.to_thread(self.start)
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def _ready_file(self) -> Path:
        return self._own_folder() / "address"

    @property
    def _log_file(self) -> Path:
        return self._own_folder() / "log"

    def _own_folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError(f"the {self.kind} has not been started")
        return self._folder

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError(f"the {self.kind} has not been started")
        return self._process

    def _close_pipe(self) -> None:
        pipe = self._started().stdin
        if pipe is not None:
            pipe.close()

    def _failed(self, what: str) -> ProcessFailed:
        log = self.log_tail()
        return ProcessFailed(f"the {self.kind} {what}" + (f"; its log ends\n{log}" if log else ""))
