"""Runs a gRPC service: logs, start, health, drain, signals, stop.

Logs are JSON lines on stderr, or readable text on a terminal. Fields of a record are passed as
`logger.info("round refused", extra={"round_id": 7})`. Prompts, tokens, handles and secrets must not
be logged.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import logging
import mmap
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import grpc

from paceline.service import limits
from paceline.service.connections import max_connections
from paceline.service.interceptor import CallInterceptor, OnEnd, request_id, server_credentials
from paceline.service.options import OptionsError, ServerOptions
from paceline.service.phases import phases
from paceline.service.tasks import keep_running
from paceline.telemetry.tracing import tracer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

LogFormat = Literal["auto", "json", "text"]
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, separators of lines, marks of direction and halves of surrogate pairs. In a
terminal they would forge lines of a log, move the cursor or reorder what is shown."""

logger = logging.getLogger("paceline.service")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# After the drain only idle streams and health watchers are left.
CLOSE_GRACE_SECONDS = 1.0
# Cancelled handlers get this long for their clean-up before the service frees everything.
CANCEL_GRACE_SECONDS = 5.0
KEEPALIVE_SECONDS = 30.0
KEEPALIVE_TIMEOUT_SECONDS = 10.0
FILES_SECONDS = 1.0  # time between two checks whether files can be opened
MIN_PING_SECONDS = 5.0  # clients may ping this often, with and without a call in flight


def configure_logging(format: LogFormat = "auto", level: str = "INFO", service: str = "") -> None:
    """Send all logs of this process to stderr, from a level such as "DEBUG" on. The format "auto"
    is "text" when stderr is a terminal and "json" otherwise, which names the service."""
    readable = format == "text" or (format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if readable else JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_beside_others() -> None:
    """Have Paceline's logs on stderr too, in a program that configures its own logs alone."""
    paceline = logging.getLogger("paceline")
    if not paceline.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(TextFormatter())
        paceline.addHandler(handler)
        paceline.setLevel(logging.INFO)


def printable(text: str) -> str:
    """Return a text on one line, with characters that are not shown escaped, as "\\x1b"."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, then the record's fields."""

    def __init__(self, service: str = "") -> None:
        super().__init__()
        self._service = {"service": service} if service else {}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_record_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        line = json.dumps(entry, default=str, ensure_ascii=False)
        # JSON itself escapes only some of them. All are inside texts.
        return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


class TextFormatter(logging.Formatter):
    """`12:34:56.789 INFO paceline.service message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _record_fields(record).items())
        line = printable(f"{time} {record.levelname} {record.name} {record.getMessage()}{fields}")
        if not record.exc_info:
            return line
        # Its message may have lines of its own: indented, none of them looks like a record.
        lines = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"  {printable(text)}" for text in lines)])


def _record_fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    current = request_id.get()
    return {"request_id": current, **fields} if current is not None else fields


def trim() -> None:
    """Return memory that only a start needed to the operating system.

    glibc keeps freed memory between blocks in use, so a service that loads several models in turn
    would grow by the weights of some. Most pages of libraries are read once, when they are loaded:
    they are unmapped, and mapped again where they are needed. Other C libraries and systems have no
    such calls.
    """
    trim_heap()
    with suppress(OSError, AttributeError):
        c = ctypes.CDLL(None)
        for start, stop in _library_pages():
            c.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return freed memory to the operating system, where the C library can. Other threads run
    meanwhile."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_one_heap() -> None:
    """Have all threads that start from now on allocate from one heap, where the C library can.

    glibc gives threads heaps of their own, each of which keeps memory between blocks in use.
    """
    arena_max = -8  # M_ARENA_MAX of malloc.h
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(arena_max, 1)


def _library_pages() -> Iterator[tuple[int, int]]:
    """Yield the addresses of pages of libraries of which this process has no copies of its own."""
    pages = (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, stop = (int(word, 16) for word in words[0].split("-"))
            library = ".so" in words[-1] and "w" not in words[1]
            pages = (start, stop) if library else (0, 0)
        elif words[0] == "Anonymous:" and words[1] == "0" and pages[1]:
            yield pages


class Stop:
    """Two events, `soft` and `hard`, and the signals that set them. ``event``: used as `soft`;
    signals are then not handled."""

    def __init__(self, event: asyncio.Event | None = None) -> None:
        self.soft = event or asyncio.Event()
        self.hard = asyncio.Event()
        self.signal = 0
        self._owns_signals = event is None and (
            threading.current_thread() is threading.main_thread()
        )

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """In the body the first signal sets `soft`, the second `hard`, and a third one kills."""
        if self._owns_signals:
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            self._restore_signals()

    async def unless(self, event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`, cancelled once `event` is set; returns whether it finished."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return True
            return False
        finally:
            waiting.cancel()
            working.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await working

    def _signalled(self, number: int) -> None:
        logger.info("a signal came", extra={"signal": signal.Signals(number).name})
        if self.soft.is_set():
            self.hard.set()
            self._restore_signals()
        self.soft.set()
        self.signal = number

    def _restore_signals(self) -> None:
        if self._owns_signals:
            self._owns_signals = False
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)


class Service(Protocol):
    """One gRPC service, or several that share their state, with a lifecycle.

    The runtime calls `start`, `register`, `fault`, `drain` and `stop` on its event loop, in this
    order. When it calls `stop`, no handler runs, unless one ignored its cancellation for
    CANCEL_GRACE_SECONDS.
    """

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names for health and reflection, such as "paceline.v1.VerifierService"."""

    @property
    def message_bytes(self) -> Mapping[str, int]:
        """Longest requests of methods ("/package.Service/Method"), where that is not
        `limits.MESSAGE_BYTES`. Unit: bytes."""

    def facts(self) -> Mapping[str, object]:
        """Return what the log says of it once it serves: models, device, memory."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers to `server`."""

    async def start(self) -> None:
        """Initialise, before the server listens. Cancelled by a signal."""

    async def fault(self) -> None:
        """Wait for an error after which the service cannot continue, and raise it.

        The server then stops without a drain. Runs while the server serves, and is cancelled when
        it stops."""

    async def drain(self) -> None:
        """Refuse new generations with UNAVAILABLE (reason DRAINING), and return when those in
        flight have finished. Cancelled after `drain_seconds` or by a second signal."""

    async def stop(self) -> None:
        """Free all resources. Called exactly once, also if `start` failed or was cancelled."""


async def run_server(
    service: Service,
    options: ServerOptions,
    *,
    metrics: CollectorRegistry | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop_event: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `stop_event` is set.

    The first signal starts the drain: health becomes NOT_SERVING, generations in flight continue
    for at most `options.drain_seconds`, then the server stops. A second signal cancels them at
    once, and a third one kills the process. With a `stop_event`, or outside the main thread,
    signals are left to the caller.

    Args:
        metrics: registry to serve at `options.metrics_address`, with this server's calls added;
            None: no metrics are served.
        on_ready: called with the bound address ("127.0.0.1:41234") once calls are answered.

    Raises:
        OptionsError: An address cannot be bound, or a TLS file is bad.
        Exception: What the service's `fault` raised, after the clean-up.
        SystemExit: With 128 + signal number, after a second signal and the clean-up.
    """
    stop = Stop(stop_event)
    with stop.on_signals():
        try:
            credentials = server_credentials(options)
            async with _metrics_served(options, metrics) as on_end:
                if await stop.unless(stop.soft, service.start()):
                    await _serve(service, options, credentials, on_end, on_ready, stop)
        finally:
            await service.stop()
            logger.info("stopped")
    if stop.hard.is_set():
        raise SystemExit(128 + stop.signal)


@asynccontextmanager
async def _metrics_served(
    options: ServerOptions, registry: CollectorRegistry | None
) -> AsyncIterator[OnEnd | None]:
    """Serve a registry for the body; yields the function that counts calls in it."""
    if registry is None:
        yield None
        return
    # Imported here: servers without metrics do not need it.
    from paceline.service.metrics import count_calls, serve_metrics

    endpoint = serve_metrics(options, registry)
    try:
        yield count_calls(registry)
    finally:
        await asyncio.to_thread(endpoint.close)


async def _serve(
    service: Service,
    options: ServerOptions,
    credentials: grpc.ServerCredentials | None,
    on_end: OnEnd | None,
    on_ready: Callable[[str], None] | None,
    stop: Stop,
) -> None:
    limit = options.max_message_bytes
    max_bytes = {method: min(limit, size) for method, size in service.message_bytes.items()}
    interceptor = CallInterceptor(options.token, on_end, tracer(), max_bytes)
    arguments = _channel_arguments(options, max(limits.MESSAGE_BYTES, *max_bytes.values(), 0))
    server = grpc.aio.server(interceptors=[interceptor], options=arguments)
    service.register(server)
    health = await _add_health(server, service.service_names)
    address = interceptor.address = _bind(server, options, credentials)
    try:
        await server.start()
        phases.begin("")
        started = {"start": str(phases)} if str(phases) else {}
        logger.info("serving", extra={"address": address, **service.facts(), **started})
        if on_ready is not None:
            on_ready(address)
        names = service.service_names
        watching = keep_running("the watch on open files", lambda: _watch_files(health, names))
        closing = keep_running(
            "the limit on connections", lambda: interceptor.connections.keep_few(address)
        )
        try:
            await stop.unless(stop.soft, service.fault())
        finally:
            watching.cancel()
            closing.cancel()
            await health.enter_graceful_shutdown()
        logger.info("draining", extra={"drain_seconds": options.drain_seconds})
        await stop.unless(stop.hard, _drain(service, options.drain_seconds))
    finally:
        await server.stop(0 if stop.hard.is_set() else CLOSE_GRACE_SECONDS)
        with suppress(TimeoutError):
            await asyncio.wait_for(interceptor.calls.drained(), CANCEL_GRACE_SECONDS)


async def _add_health(server: grpc.aio.Server, names: tuple[str, ...]) -> Any:
    """Add health, with `names` and the server itself SERVING, and reflection to `server`."""
    # Imported here: a client-only install reads this package's options and has no grpc_health.
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    servicer: Any = health.aio.HealthServicer()
    for name in names:
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return servicer


def files_left() -> bool:
    """Return whether this process may open some more files: connections, KV caches."""
    try:
        with ExitStack() as opened:
            for _ in range(limits.SPARE_FILES):
                opened.enter_context(socket.socket())
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    return True


async def _watch_files(health: Any, names: tuple[str, ...]) -> None:
    """Let health say NOT_SERVING while no request can be taken for want of open files."""
    from grpc_health.v1 import health_pb2

    serving = True
    while True:
        await asyncio.sleep(FILES_SECONDS)
        if serving == files_left():
            continue
        serving = not serving
        if serving:
            logger.info("files can be opened again")
        else:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "%d files are open, which is the limit: close connections, or raise `ulimit -n`",
                limit,
            )
        status = health_pb2.HealthCheckResponse
        for name in ("", *names):
            await health.set(name, status.SERVING if serving else status.NOT_SERVING)


async def _drain(service: Service, seconds: float) -> None:
    """Drain for at most `seconds`; an error in it does not keep the server from stopping."""
    try:
        await asyncio.wait_for(service.drain(), seconds)
    except TimeoutError:
        logger.warning("generations were still in flight after the drain time; cancelling them")
    except Exception:
        logger.exception("drain failed")


def check_address(address: str) -> None:
    """Raises OptionsError if no server can listen on a host and port, before a model is loaded."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdecimal():
        return
    try:
        if int(port) >= 2**16:
            raise OSError("ports are at most 65535")
        family, kind, *_, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        reason = error.strerror or error
        raise OptionsError(
            f"cannot listen on {address} ({reason}): end what uses it, or give another address"
        ) from None


def _bind(
    server: grpc.aio.Server, options: ServerOptions, credentials: grpc.ServerCredentials | None
) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(options.address)
        else:
            port = server.add_secure_port(options.address, credentials)
    except RuntimeError as error:
        raise OptionsError(
            f"cannot listen on {options.address}: it is in use, or not an address of this machine"
        ) from error
    if options.socket_path is not None:
        # Only the user of this process may open the socket, and so call the service.
        options.socket_path.chmod(0o600)
        return options.address
    return f"{options.address.rpartition(':')[0]}:{port}"


def _channel_arguments(options: ServerOptions, max_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", max_connections()[1]),
        ("grpc.max_receive_message_length", min(max_bytes, options.max_message_bytes)),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_concurrent_streams", options.max_concurrent_streams),
        ("grpc.server_handshake_timeout_ms", limits.TRANSPORT_SECONDS * 1000),
        # Without this, a second server on the same port would take half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(MIN_PING_SECONDS * 1000)),
    ]
