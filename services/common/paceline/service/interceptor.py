"""Every call: identity of the caller, TLS, token, errors, counting, logging and spans."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.service import limits
from paceline.service.connections import ServerConnections
from paceline.service.messages import MessageTooLarge, parse
from paceline.service.options import OptionsError, ServerOptions
from paceline.telemetry.names import Attribute
from paceline.telemetry.tracing import Attributes, annotate, server_attributes, server_span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

LOCAL_OWNER = "local"
_BEARER = "bearer "
# New in every process: owner names may be logged, and a weak token must not be recoverable.
_KEY = secrets.token_bytes(32)
# Subject fields of a certificate, which stay the same when it is renewed.
_SUBJECT_KEYS = ("x509_subject", "x509_subject_alternative_name", "x509_common_name")
DOMAIN = "paceline"
# Trailing metadata holds the text twice, and peers accept 8 KiB of it in total.
MAX_MESSAGE_CHARS = 1500
MAX_METADATA_CHARS = 200
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the call whose handler runs; added to every log record."""

logger = logging.getLogger("paceline.service")
Behaviour = Callable[[Any, Any], Any]
Deserializer = Callable[[bytes], Any]
OnEnd = Callable[[str, str, str], None]
"""Called with method ("unknown" if there is none), status code and reason ("" if none)."""

_HEALTH = "/grpc.health.v1.Health/"
_REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def owner_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the identity of the caller, stable for the life of this process.

    A keyed hash of the subject of a verified client certificate, else of the bearer token (also if
    the server requires none), else `"local"`.
    """
    return owner_from(context.invocation_metadata() or (), context.auth_context() or {})


def owner_from(
    metadata: Iterable[tuple[str, str | bytes]], auth: Mapping[str, Iterable[bytes]]
) -> str:
    """Return the same, of a call's metadata and its transport's auth context."""
    subject = [value for key in _SUBJECT_KEYS for value in auth.get(key, ())]
    if subject:
        return _name(b"subject\0" + b"\0".join(subject))
    token = bearer_token(metadata)
    return _name(b"token\0" + token.encode()) if token else LOCAL_OWNER


def user_of(owner: str, user: str) -> str:
    """Return the identity of one of a caller's users, for whom the caller itself speaks; the
    caller's own if `user` is empty."""
    return _name(f"user\0{owner}\0{user}".encode()) if user else owner


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the token of the `authorization: Bearer ...` metadata, or None."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(_BEARER):
            return value[len(_BEARER) :].strip()
    return None


def token_matches(given: str | None, expected: str) -> bool:
    """Compare tokens in constant time."""
    return given is not None and hmac.compare_digest(_digest(given), _digest(expected))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _name(fact: bytes) -> str:
    return hashlib.blake2b(fact, key=_KEY, digest_size=16).hexdigest()


def server_credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """Return credentials for `options`, or None without TLS. Raises OptionsError: a file cannot be
    read, is not PEM, needs a passphrase, or certificate and key are not a pair."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    _check_pair(options.tls_cert, options.tls_key)
    pair = (options.tls_key.read_bytes(), options.tls_cert.read_bytes())
    if options.tls_client_ca is None:
        return grpc.ssl_server_credentials([pair])
    check_authorities(options.tls_client_ca)
    return grpc.ssl_server_credentials(
        [pair], root_certificates=options.tls_client_ca.read_bytes(), require_client_auth=True
    )


def https_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the TLS context of an HTTP server; None: the options have no certificate."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    context = _check_pair(options.tls_cert, options.tls_key)
    if options.tls_client_ca is not None:
        context.load_verify_locations(options.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_pair(cert: Path, key: Path) -> ssl.SSLContext:
    # gRPC accepts wrong files and then fails each handshake without a log line.
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: "")
        return context
    except OSError as error:
        raise OptionsError(
            f"the TLS files {cert} and {key} are not a PEM certificate and its key without a "
            f"passphrase: {error}"
        ) from error


def check_authorities(file: Path) -> None:
    """Check that a file holds certificates of authorities; gRPC does not. Raises OptionsError: it
    cannot be read, or holds none."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except OSError as error:
        raise OptionsError(f"{file} holds no PEM certificates of authorities: {error}") from error


class _Constructor:
    """Makes errors of one status code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def __call__(
        self, reason: str, message: str, retry_after: float | None = None, **metadata: str
    ) -> ServiceError:
        return ServiceError(self._code, reason, message, retry_after=retry_after, **metadata)


class ServiceError(Exception):
    """The failure of a call, as sent to its caller.

    The runtime turns it into a `google.rpc.Status` with an `ErrorInfo` (domain "paceline") and, if
    `retry_after` is set, a `RetryInfo`. Servicers raise it instead of calling `abort`. `reason` is
    a stable UPPER_SNAKE_CASE name that programs may compare; `message` says what was wrong, what
    was expected and what to do, without secrets; `retry_after` is in seconds; `metadata` are
    further facts for programs.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        retry_after: float | None = None,
        **metadata: str,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.retry_after, self.metadata = retry_after, metadata

    invalid_argument = _Constructor(grpc.StatusCode.INVALID_ARGUMENT)
    """The request is wrong in any state of the service."""
    not_found = _Constructor(grpc.StatusCode.NOT_FOUND)
    """What the request names does not exist, or belongs to another caller."""
    failed_precondition = _Constructor(grpc.StatusCode.FAILED_PRECONDITION)
    """The state does not allow it; repeating the same call does not help."""
    resource_exhausted = _Constructor(grpc.StatusCode.RESOURCE_EXHAUSTED)
    """A limit is reached; the call may succeed `retry_after` seconds later."""
    unavailable = _Constructor(grpc.StatusCode.UNAVAILABLE)
    """This process does not accept the call now; another one, or a retry, may."""
    aborted = _Constructor(grpc.StatusCode.ABORTED)  # another call took over
    unauthenticated = _Constructor(grpc.StatusCode.UNAUTHENTICATED)
    """The caller sent no valid credentials."""
    unimplemented = _Constructor(grpc.StatusCode.UNIMPLEMENTED)  # the method is not implemented
    internal = _Constructor(grpc.StatusCode.INTERNAL)  # an error of the service itself

    def to_status(self) -> status_pb2.Status:
        """Return the rich status to send. Long texts are truncated, lone surrogates replaced."""
        info = error_details_pb2.ErrorInfo(domain=DOMAIN, reason=self.reason)
        for key, value in self.metadata.items():
            info.metadata[key] = _clean(value, MAX_METADATA_CHARS)
        details = [_pack(info)]
        if self.retry_after is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(max(0.0, self.retry_after) * 1000))
            details.append(_pack(retry))
        return status_pb2.Status(
            code=self.code.value[0],
            message=_clean(self.message, MAX_MESSAGE_CHARS),
            details=details,
        )


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _clean(text: str, limit: int) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


# With and without stubs for grpc installed: its classes are generic only in the stubs.
# mypy: disallow-subclassing-any=False, disallow-any-generics=False, warn-return-any=False


class Gate:
    """Admits generations or calls until it is closed, and waits for those in flight.

    Not thread-safe: used on one event loop. A service enters it once per generation, and closes
    and awaits it in `Service.drain`.
    """

    def __init__(self) -> None:
        self.inside = 0  # number of generations in flight
        self.closed = False  # True once the service drains
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count the body as in flight. Raises ServiceError: UNAVAILABLE with reason DRAINING after
        `close`."""
        if self.closed:
            raise ServiceError.unavailable(
                "DRAINING",
                "the service is shutting down and takes no new generations; "
                "try another instance, or this one again after its restart",
            )
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def close(self) -> None:
        """Refuse new work from now on."""
        self.closed = True

    async def drained(self) -> None:
        """Return when nothing is in flight."""
        await self._empty.wait()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks the token, maps exceptions to rich statuses, counts and logs calls.

    It wraps calls, not messages: the wrapper writes a response stream itself, in place of grpc.
    Calls of the health service are not intercepted.
    """

    def __init__(
        self,
        token: str | None,
        on_end: OnEnd | None = None,
        tracer: Tracer | None = None,
        max_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Make an interceptor. A token is required of callers, if there is one; `on_end` is called
        when a call has ended; `tracer` makes spans of unary calls with a traceparent in their
        metadata (messages of streams have their own). `max_bytes` has the limits of requests, of
        methods ("/package.Service/Method") with others than `limits.MESSAGE_BYTES`."""
        self._token = token
        self._max_bytes = max_bytes
        self._on_end = on_end
        self._tracer = tracer
        self.address = ""  # where the server listens, for spans; set before the first call
        self.calls = Gate()  # the calls in flight, health watchers not counted
        self.connections = ServerConnections()  # the server's connections

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of a call that just came in."""
        method: str = handler_call_details.method
        handler: Any = await continuation(handler_call_details)
        if method.startswith(_HEALTH):
            return handler
        if self._token is not None and not token_matches(
            bearer_token(handler_call_details.invocation_metadata or ()), self._token
        ):
            error = ServiceError.unauthenticated(
                "UNAUTHENTICATED",
                "this server needs a bearer token: send the metadata 'authorization: Bearer TOKEN'",
            )
            return self._refusing(method, error, known=handler is not None)
        if handler is None:
            unknown = f"this server has no method {method}"
            error = ServiceError.unimplemented("METHOD_UNKNOWN", unknown)
            return self._refusing(method, error, known=False)
        return self._wrapped(method, handler)

    def _wrapped(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        max_bytes = self._max_bytes.get(method, limits.MESSAGE_BYTES)
        decode: Deserializer = _decoder(handler.request_deserializer, max_bytes)
        kind = "_".join(
            "stream" if streaming else "unary"
            for streaming in (handler.request_streaming, handler.response_streaming)
        )
        behaviour: Behaviour = getattr(handler, kind)

        async def call(request: Any, context: Any) -> Any:
            # A single request is decoded here, so that errors of decoding are mapped too.
            message = request if handler.request_streaming else decode(request)
            outcome = behaviour(message, context)
            if handler.response_streaming:
                await _send(outcome, context)
                return None
            return await outcome

        traced: Behaviour = call
        if self._tracer is not None and kind == "unary_unary":
            traced = _traced(self._tracer, method, call, server_attributes(self.address))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            self._guarded(method, traced),
            request_deserializer=decode if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )

    def _refusing(self, method: str, error: ServiceError, *, known: bool) -> grpc.RpcMethodHandler:
        async def refuse(_request: Any, _context: Any) -> None:
            raise error

        # A handler of this kind fits calls of every kind: it fails before it reads a message.
        return grpc.stream_stream_rpc_method_handler(self._guarded(method, refuse, known=known))

    def _guarded(self, method: str, call: Behaviour, *, known: bool = True) -> Behaviour:
        async def guarded(request: Any, context: Any) -> Any:
            token = request_id.set(_request_id_of(context))
            started = time.monotonic()
            error: ServiceError | None = None
            outcome = "CANCELLED"
            try:
                with self.calls.enter(), self.connections.in_call(_port(context.peer())):
                    response = await call(request, context)
                outcome = "OK"
                return response
            except ServiceError as raised:
                error = raised
            except NotImplementedError:
                missing = f"{method} is not built in this version"
                error = ServiceError.unimplemented("NOT_BUILT", missing)
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                # The handler aborted, or the peer disconnected during a write.
                outcome = "ENDED_BY_GRPC"
                raise
            except Exception as fault:
                error = _unexpected(method, fault)
            finally:
                if error is not None:
                    outcome = error.code.name
                _log_call(method, outcome, time.monotonic() - started, error)
                if self._on_end is not None:
                    # Callers could add any number of series by calls of unknown methods.
                    name = method if known else "unknown"
                    self._on_end(name, outcome, error.reason if error is not None else "")
                request_id.reset(token)
            status = rpc_status.to_status(error.to_status())
            error = None  # it holds this frame, and with it all that the handler used
            return await context.abort_with_status(status)

        return guarded


def _port(peer: str) -> int:
    """Return the port of a peer such as "ipv4:127.0.0.1:4242"; 0: it has none."""
    port = peer.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def _traced(tracer: Tracer, method: str, call: Behaviour, server: Attributes) -> Behaviour:
    """Return a handler of `method` ("/package.Service/Method") with a span of each traced call."""
    name = method.removeprefix("/")
    attributes = {Attribute.RPC_SYSTEM: "grpc", Attribute.RPC_METHOD: name, **server}

    async def traced(request: Any, context: Any) -> Any:
        traceparent = dict(context.invocation_metadata() or ()).get("traceparent", "")
        with server_span(tracer, name, str(traceparent), attributes):
            try:
                response = await call(request, context)
                annotate({Attribute.RPC_STATUS: "OK"})
                return response
            except ServiceError as error:
                annotate({Attribute.RPC_STATUS: error.code.name})
                raise

    return traced


async def _send(outcome: Any, context: Any) -> None:
    """Write what a streaming handler yields; a coroutine, which writes by itself, is awaited."""
    if not isinstance(outcome, AsyncGenerator):
        await outcome
        return
    async with aclosing(outcome) as responses:
        async for response in responses:
            await context.write(response)


def _decoder(deserializer: Deserializer | None, max_bytes: int) -> Deserializer:
    if deserializer is None:
        return lambda raw: raw
    # The generated code has the bound method of a message's class, others any function.
    kind = getattr(deserializer, "__self__", None)

    def decode(raw: bytes) -> Any:
        try:
            if isinstance(kind, type) and issubclass(kind, Message):
                return parse(kind, raw, max_bytes)
            return deserializer(raw)
        except MessageTooLarge as error:
            raise ServiceError.invalid_argument(
                "MESSAGE_TOO_LARGE", f"{error}; send less in one request"
            ) from error
        except DecodeError as error:
            raise ServiceError.invalid_argument(
                "MALFORMED_MESSAGE",
                "the request is not a message of this method (wrong bytes, or text that is not "
                "UTF-8); use the .proto files of this version",
            ) from error

    return decode


def _request_id_of(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == _REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(8)


def _unexpected(method: str, fault: Exception) -> ServiceError:
    error_id = secrets.token_hex(8)
    logger.error("unexpected error", exc_info=fault, extra={"rpc": method, "error_id": error_id})
    return ServiceError.internal(
        "INTERNAL_ERROR",
        f"unexpected error in the service; its log has the cause under error_id {error_id}",
        error_id=error_id,
    )


def _log_call(method: str, outcome: str, seconds: float, error: ServiceError | None) -> None:
    fields: dict[str, object] = {"rpc": method, "code": outcome, "ms": round(seconds * 1000, 3)}
    if error is not None:
        fields["reason"] = error.reason
    logger.debug("call ended", extra=fields)
