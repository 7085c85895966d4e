"""The calls of a client to its services: an interface, and its implementation with gRPC.

`MockTransport` is another implementation. A transport raises exceptions of this package only.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import grpc

from paceline.telemetry.tracing import current_metadata
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

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
    ("grpc.max_reconnect_backoff_ms", 1000),
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


VerifyStream = Stream[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse]
DraftStream = Stream[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]


class Transport(Protocol):
    """The calls of a client. All may run concurrently."""

    @property
    def verifier_address(self) -> str:
        """Address of the verifier's KvExchangeService for drafters; empty: no KV for drafters."""

    @property
    def has_drafter(self) -> bool:
        """Whether there is a drafter service to call."""

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse: ...

    def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]: ...

    def verify(self) -> VerifyStream: ...

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None: ...

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None: ...

    def draft(self) -> DraftStream: ...

    async def list_drafters(self) -> drafter_pb2.ListDraftersResponse: ...

    async def close(self) -> None: ...


class GrpcTransport:
    """Calls a verifier and, if there is one, a drafter. Connects with the first call.

    Addresses are "host:port" or "unix:/path". Every call carries the bearer token, which is refused
    without TLS beyond loopback, and in `paceline-client` a random name of this transport. A load
    balancer that hashes the name sends all calls of a client to the verifier with its caches.

    Raises:
        InvalidRequestError: The token would be sent unencrypted, or a TLS file cannot be read.
    """

    def __init__(
        self,
        verifier_address: str,
        drafter_address: str | None = None,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        for address in (verifier_address, drafter_address):
            if token and tls is None and address and not _is_local(address):
                raise InvalidRequestError(
                    f"a token would travel to {address} unencrypted: give tls=TlsOptions(...)"
                )
        self.verifier_address = verifier_address
        self._drafter_address = drafter_address or ""
        self._metadata = (
            (CLIENT_HEADER, secrets.token_hex(8)),
            *([("authorization", f"Bearer {token}")] if token else []),
        )
        self._credentials = tls.credentials() if tls else None
        self._options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *_CHANNEL_OPTIONS,
            *(tls.channel_options() if tls else []),
        ]
        self._channels: list[Any] = []

    @property
    def has_drafter(self) -> bool:
        return bool(self._drafter_address)

    @cached_property
    def _verifier(self) -> Any:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub
        return stub(self._channel(self.verifier_address))

    @cached_property
    def _drafter(self) -> Any:
        stub: Any = drafter_pb2_grpc.DrafterServiceStub
        return stub(self._drafter_channel)

    @cached_property
    def _registry(self) -> Any:
        stub: Any = drafter_pb2_grpc.DrafterRegistryServiceStub
        return stub(self._drafter_channel)

    @cached_property
    def _drafter_channel(self) -> Any:
        return self._channel(self._drafter_address)

    def _channel(self, address: str) -> Any:
        """A channel. It binds to the running event loop, so the first call creates it."""
        if self._credentials is None:
            channel = _aio.insecure_channel(address, options=self._options)
        else:
            channel = _aio.secure_channel(address, self._credentials, options=self._options)
        self._channels.append(channel)
        return channel

    async def _unary(self, method: Any, request: Any) -> Any:
        with rpc_errors():
            return await method(request, metadata=(*self._metadata, *current_metadata()))

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse:
        model: verifier_pb2.GetModelResponse = await self._unary(self._verifier.GetModel, request)
        return model

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        with rpc_errors():
            call = self._verifier.CreateCache(request, metadata=self._metadata)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    def verify(self) -> VerifyStream:
        return _GrpcStream(self._verifier.Verify(metadata=self._metadata))

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None:
        await self._unary(self._verifier.RenewLease, request)

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        await self._unary(self._verifier.ReleaseCache, request)

    def draft(self) -> DraftStream:
        return _GrpcStream(self._drafter.Draft(metadata=self._metadata))

    async def list_drafters(self) -> drafter_pb2.ListDraftersResponse:
        # Not part of the generation's trace: the result is shared by all generations.
        with rpc_errors():
            listed: drafter_pb2.ListDraftersResponse = await self._registry.ListDrafters(
                drafter_pb2.ListDraftersRequest(), metadata=self._metadata
            )
            return listed

    async def close(self) -> None:
        while self._channels:
            await self._channels.pop().close()


class _GrpcStream(Generic[Request, Response]):
    """One grpc.aio bidirectional call behind the `Stream` interface."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, request: Request) -> None:
        with rpc_errors():
            await self._call.write(request)

    async def read(self) -> Response | None:
        with rpc_errors():
            response = await self._call.read()
        return None if response is _EOF else response

    def cancel(self) -> None:
        self._call.cancel()


def _is_local(address: str) -> bool:
    """Whether the address is on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
