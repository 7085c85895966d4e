"""Local services, named models and prompt files, for commands, benchmarks and tests. No torch."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import grpc

from paceline.service.files import read_text
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

__all__ = [
    "JOIN_SECONDS",
    "NO_PROXY",
    "PHASE",
    "PROMPT_FILE",
    "Kind",
    "ProcessFailed",
    "ServiceProcess",
    "has_drafter",
    "local_services",
    "model_of",
    "read_prompts",
    "with_port",
]

Kind = Literal["verifier", "drafter", "gateway", "serve"]

_POLL_SECONDS = 0.01
_LOG_TAIL_BYTES = 8192
_CALL_SECONDS = 5.0
JOIN_SECONDS = 60.0  # maximum wait from the start of both services until the drafter has joined
PHASE = ".phase"  # suffix, beside the ready file, of what a starting service says it does
# Of a channel to a service of this machine: gRPC else sends its calls to the environment's proxy.
NO_PROXY = (("grpc.enable_http_proxy", 0),)
# Keys of the prompt in common data sets: HumanEval, MBPP, MT-bench and GSM8K among them.
_PROMPT_FIELDS = ("prompt", "text", "turns", "question")

PROMPT_FILE = (
    "JSON lines, each a text, a list of token ids, or an object with one as "
    f"{', '.join(_PROMPT_FIELDS)} (of turns the first); any other file is one prompt"
)  # description of the format, for --help


class ProcessFailed(RuntimeError):
    """A service process died or was not ready in time. The message includes the end of its log."""


class ServiceProcess:
    """One `paceline verifier`, `paceline drafter` or `paceline gateway` process, or a `paceline
    serve` of one model, whose address is its verifier's.

    A context manager, sync and async: entering starts the service and waits until it answers calls,
    leaving stops it. The child holds one end of a pipe to this process and also stops when this
    process ends in any other way.

    Args:
        kind: Sub-command to run.
        arguments: Its arguments, such as `["--target", "models/demo/target"]`. `--address`,
            `--ready-file` and `--stop-with-stdin` are added.
        address: Address to listen on; port 0 takes a free port.
        environment: Variables that override this process's.
        wrapper: Command that execs the service, such as `unshare` with its arguments.
        show_log: Write the log to this process's stderr instead of a file.
        ready_seconds: Maximum seconds until the service is ready.
        main: Runs the command line with these words in a fork of this process, which shares the
            memory of what is imported here and starts sooner. For the first start, while this
            process has one thread; a restart starts a new interpreter. None: so does the first.
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
        main: Callable[[Sequence[str]], int] | None = None,
    ) -> None:
        self.kind = kind
        self.arguments = tuple(arguments)
        self.environment = dict(environment or {})
        self._wrapper = tuple(wrapper)
        self.requested_address = address
        self._bound_address: str | None = None
        self._show_log = show_log
        self._ready_seconds = ready_seconds
        self._main = main
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_deadline = 0.0

    @property
    def address(self) -> str:
        """Bound address. Known once the service is ready, and kept when it restarts."""
        if self._bound_address is None:
            raise RuntimeError(f"the {self.kind} has not been ready yet: start it first")
        return self._bound_address

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._started().poll()

    def start(self) -> Self:
        """Start the service and wait until it answers calls. A restart reuses the bound address.
        Raises ``ProcessFailed`` if it dies before it is ready, or takes longer than
        `ready_seconds`."""
        self.spawn()
        self.wait_ready()
        return self

    def spawn(self) -> None:
        """Start the service and return at once. A restart reuses the bound address."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"the {self.kind} is already running")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"paceline-{self.kind}-"))
        for file in (self._ready_file, self._ready_file.with_suffix(PHASE)):
            file.unlink(missing_ok=True)
        words = [
            *(self.kind, *self.arguments),
            "--verifier-address" if self.kind == "serve" else "--address",
            *(self._bound_address or self.requested_address, "--ready-file", str(self._ready_file)),
            "--stop-with-stdin",
        ]
        main, self._main = self._main, None
        with self._log_file.open("ab") as log:
            output = None if self._show_log else log
            self._process = subprocess.Popen(
                [*self._wrapper, sys.executable, "-m", "paceline.cli.main", *words],
                preexec_fn=None if main is None else partial(_run_forked, main, words),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                # Ctrl-C in a terminal must reach this process only, which then stops the child.
                start_new_session=True,
            )
        self._ready_deadline = time.monotonic() + self._ready_seconds

    def wait_ready(self) -> None:
        """Wait until the spawned service answers calls. Raises ProcessFailed as `start`."""
        while not self.poll_ready():
            time.sleep(_POLL_SECONDS)

    @property
    def phase(self) -> str:
        """What the start of the process is busy with; empty before it has said it."""
        try:
            return self._ready_file.with_suffix(PHASE).read_text(encoding="utf-8")
        except OSError:
            return ""

    @property
    def was_ready(self) -> bool:
        """Whether the running or last process has answered calls."""
        return self._ready_file.exists()

    def poll_ready(self) -> bool:
        """Return whether the spawned service answers calls. Raises ProcessFailed as `start`."""
        if self.was_ready:
            self._bound_address = self._ready_file.read_text(encoding="utf-8").partition("\n")[0]
            return True
        if self.returncode is not None:
            raise self.failed(f"ended with code {self.returncode} before it was ready")
        if time.monotonic() > self._ready_deadline:
            self.kill()
            raise self.failed(f"was not ready within {self._ready_seconds:g} s")
        return False

    def send_signal(self, number: signal.Signals) -> None:
        self._started().send_signal(number)

    def terminate(self, timeout: float = 60.0) -> int:
        """Send SIGTERM and wait for the drain; send SIGKILL after `timeout` seconds. Returns the
        exit code, 0 for a clean drain."""
        process = self._started()
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
        return self._reap(process)

    def kill(self) -> None:
        process = self._started()
        process.kill()
        self._reap(process)

    def stop(self) -> None:
        """Terminate the process and remove its files. Safe to call again."""
        if self._process is not None:
            self.terminate()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log; empty with `show_log` and after `stop`."""
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

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *error: object) -> None:
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

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the {self.kind} has not been started")
        return self._process

    @staticmethod
    def _reap(process: subprocess.Popen[bytes]) -> int:
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        return code

    def failed(self, what: str) -> ProcessFailed:
        """Return the error that says what the process did, with the end of its log."""
        log = self.log_tail()
        return ProcessFailed(f"the {self.kind} {what}" + (f"; its log ends\n{log}" if log else ""))


def _run_forked(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> NoReturn:
    """Run a command in a child of ``Popen`` and end it, in place of the program to execute."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the parent waits for the end of one of them
    Path("/proc/self/comm").write_text(words[0])  # as `ps -o comm` shows it
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    code = 1
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def local_services(
    verifier: Sequence[str], drafter: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Run a verifier and a drafter that has joined it with these arguments, started side by side.

    Both stop at the end of the block. Raises ProcessFailed if one of them is not ready in time.
    """
    address = with_port("127.0.0.1:0")
    first = ServiceProcess("verifier", verifier, address=address, environment=environment)
    joining = [*drafter, f"--verifier={address}"]
    processes = first, ServiceProcess("drafter", joining, environment=environment)
    try:
        for process in processes:
            process.spawn()
        for process in processes:
            process.wait_ready()
        with grpc.insecure_channel(address, NO_PROXY) as channel:
            _wait_joined(channel, *processes)
        yield processes
    finally:
        for process in processes:
            process.stop()


def with_port(address: str) -> str:
    """Return an address with a free port for port 0, if services must know it beforehand."""
    host, _, port = address.rpartition(":")
    if port != "0":
        return address
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host.strip("[]"), 0))
        return f"{host}:{free.getsockname()[1]}"


def has_drafter(channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()) -> bool:
    """Return whether a drafter has joined the verifier of a channel; arguments of `model_of`."""
    model = model_of(channel, metadata)
    return model is not None and bool(model.drafter_services)


def model_of(
    channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()
) -> verifier_pb2.GetModelResponse | None:
    """Return the model of the verifier of a channel, without its tokenizer; None if it does not
    answer. Its bearer token is in the metadata of the call."""
    stub: Any = verifier_pb2_grpc.VerifierServiceStub
    request = verifier_pb2.GetModelRequest(omit_tokenizer=True)
    try:
        model: verifier_pb2.GetModelResponse = stub(channel).GetModel(
            request, metadata=metadata, timeout=_CALL_SECONDS
        )
    except grpc.RpcError:
        return None
    return model


def _wait_joined(channel: grpc.Channel, verifier: ServiceProcess, drafter: ServiceProcess) -> None:
    """Wait until a drafter has joined a verifier. Raises ProcessFailed if it does not."""
    deadline = time.monotonic() + JOIN_SECONDS
    while not has_drafter(channel):
        for process in (verifier, drafter):
            if process.returncode is not None:
                raise process.failed(f"ended with code {process.returncode}")
        if time.monotonic() > deadline:
            raise drafter.failed(f"did not join the verifier within {JOIN_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def read_prompts(path: Path) -> list[str | list[int]]:
    """Return the prompts, texts or token ids, of a file; `PROMPT_FILE` describes the format. Raises
    OSError if it cannot be read, ValueError if it has no prompt, or a line that is not one."""
    text = read_text(path)
    if path.suffix not in (".jsonl", ".json"):
        if not text.strip():
            raise ValueError(f"{path} is empty; expected a prompt")
        return [text]
    # Not `splitlines`: a text in JSON may contain other characters that end lines.
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompt; expected one a line")
    return [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt(line: str, where: str) -> str | list[int]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if isinstance(entry, dict):
        entry = next((entry[name] for name in _PROMPT_FIELDS if name in entry), None)
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            entry = entry[0]  # a conversation: its first turn
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, list) and entry and all(type(id) is int and id >= 0 for id in entry):
        return entry
    raise ValueError(
        f"{where}: expected a text or token ids, or an object with one of {_PROMPT_FIELDS}"
    )
