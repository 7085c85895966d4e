"""The calls of a client to a verifier and a drafter service: interfaces, and gRPC.

`MockTransport` is another implementation. A transport raises exceptions of this package only.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import grpc

from paceline.telemetry.tracing import current_metadata
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

from ._addresses import host_of
from ._errors import InvalidRequestError, rpc_errors
from ._options import TlsOptions

CLIENT_HEADER = "paceline-client"
"""Metadata key of a client's random name; load balancers hash it."""

_aio: Any = grpc.aio
_EOF = _aio.EOF

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # A peer that no longer answers is detected within 40 seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect quickly to a restarted service: RetryOptions limit the attempts.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Clients of one process must not share connections and their back-off.
    ("grpc.use_local_subchannel_pool", 1),
]

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class Stream(Protocol[Request, Response]):
    """A bidirectional stream. One task writes, one task reads.

    Cancelling a task inside `read` or `write` ends the stream.
    """

    async def write(self, request: Request) -> None:
        """Sends one message. Raises UnavailableError if the stream has ended."""

    async def read(self) -> Response | None:
        """The next message; None if the peer ended the stream without an error."""

    def cancel(self) -> None:
        """Ends the stream, in any state."""


GenerateStream = Stream[verifier_pb2.GenerateRequest, verifier_pb2.GenerateResponse]


@runtime_checkable
class Transport(Protocol):
    """The calls of a client to a verifier. All may run concurrently."""

    @property
    def address(self) -> str:
        """Address of the verifier, for drafter services to join it; empty: they cannot."""

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse: ...

    def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]: ...

    def generate(self) -> GenerateStream: ...

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None: ...

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None: ...

    async def close(self) -> None: ...


class DrafterTransport(Protocol):
    """The calls of a client to a drafter service's registry. All may run concurrently."""

    running: int
    """Number of generations that use the connection: none, because they use verifiers only."""

    @property
    def address(self) -> str:
        """Address of the service."""

    async def list_drafters(self) -> drafter_pb2.ListDraftersResponse: ...

    async def join_verifier(self, address: str) -> None: ...

    async def close(self) -> None: ...


class Connections:
    """How a client connects to its services.

    Every call carries the bearer token, which is refused without TLS beyond loopback, and in
    `paceline-client` a random name of the client. A load balancer that hashes the name sends all
    calls of a client to the verifier with its caches.

    Args:
        token: Bearer token; None: none.
        tls: TLS options; None: no TLS.
        max_message_bytes: Longest message received or sent.

    Raises:
        InvalidRequestError: A TLS file cannot be read.
    """

    def __init__(
        self,
        token: str | None = None,
        tls: TlsOptions | None = None,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        self._token, self._tls = token, tls
        self.metadata = (
            (CLIENT_HEADER, secrets.token_hex(8)),
            *([("authorization", f"Bearer {token}")] if token else []),
        )
        self._credentials = tls.credentials() if tls else None
        self._options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *_CHANNEL_OPTIONS,
        ]

    def check(self, address: str) -> None:
        """Raises InvalidRequestError if the token would travel to an address unencrypted."""
        if self._token and self._tls is None and host_of(address) != "localhost":
            raise InvalidRequestError(
                f"a token would travel to {address} unencrypted: give tls=TlsOptions(...)"
            )

    def channel(self, address: str, name: str) -> Any:
        """A channel, which binds to the running event loop.

        Args:
            address: "host:port" or "unix:/path".
            name: DNS name that was resolved to the address, for its certificate; empty: none.
        """
        if self._credentials is None or self._tls is None:
            return _aio.insecure_channel(address, options=self._options)
        options = [*self._options, *self._tls.channel_options(name)]
        return _aio.secure_channel(address, self._credentials, options=options)


class _GrpcService:
    """Calls one service. Connects with the first call.

    Args:
        connections: Token, TLS and limits.
        address: "host:port" or "unix:/path".
        name: DNS name that was resolved to the address; empty: none.
    """

    kind = ""

    def __init__(self, connections: Connections, address: str, name: str = "") -> None:
        self.address = address
        self._connections = connections
        self._metadata = connections.metadata
        self._name = name

    @cached_property
    def _channel(self) -> Any:
        return self._connections.channel(self.address, self._name)

    async def _unary(self, method: Any, request: Any) -> Any:
        with rpc_errors(self.kind, self.address):
            return await method(request, metadata=(*self._metadata, *current_metadata()))

    async def close(self) -> None:
        if "_channel" in self.__dict__:
            await self._channel.close()


class GrpcTransport(_GrpcService):
    """Calls a verifier by gRPC."""

    kind = "verifier"

    @cached_property
    def _verifier(self) -> Any:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub
        return stub(self._channel)

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse:
        model: verifier_pb2.GetModelResponse = await self._unary(self._verifier.GetModel, request)
        return model

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        with rpc_errors(self.kind, self.address):
            call = self._verifier.CreateCache(request, metadata=self._metadata)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    def generate(self) -> GenerateStream:
        return _GrpcStream(self._verifier.Generate(metadata=self._metadata), self.address)

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None:
        await self._unary(self._verifier.RenewLease, request)

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        await self._unary(self._verifier.ReleaseCache, request)


class GrpcDrafterTransport(_GrpcService):
    """Calls the registry of a drafter service by gRPC."""

    kind = "drafter"
    running = 0

    @cached_property
    def _registry(self) -> Any:
        stub: Any = drafter_pb2_grpc.DrafterRegistryServiceStub
        return stub(self._channel)

    # Neither call is part of a generation's trace: their results are shared by all generations.

    async def list_drafters(self) -> drafter_pb2.ListDraftersResponse:
        with rpc_errors(self.kind, self.address):
            listed: drafter_pb2.ListDraftersResponse = await self._registry.ListDrafters(
                drafter_pb2.ListDraftersRequest(), metadata=self._metadata
            )
            return listed

    async def join_verifier(self, address: str) -> None:
        request = drafter_pb2.JoinVerifierRequest(address=address)
        with rpc_errors(self.kind, self.address):
            await self._registry.JoinVerifier(request, metadata=self._metadata)


class _GrpcStream(Generic[Request, Response]):
    """One grpc.aio bidirectional call behind the `Stream` interface."""

    __slots__ = ("_address", "_call")

    def __init__(self, call: Any, address: str) -> None:
        self._call, self._address = call, address

    async def write(self, request: Request) -> None:
        with rpc_errors("verifier", self._address):
            await self._call.write(request)

    async def read(self) -> Response | None:
        with rpc_errors("verifier", self._address):
            response = await self._call.read()
        return None if response is _EOF else response

    def cancel(self) -> None:
        self._call.cancel()
