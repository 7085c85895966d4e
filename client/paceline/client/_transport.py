"""The seam between the client's logic and the network.

Everything above works on `Transport`; `GrpcTransport` speaks to real services, `MockTransport`
answers from memory. A transport raises this package's exceptions only.
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
"""Metadata key of a client's random name; balancers are configured with it."""

_aio: Any = grpc.aio
_EOF = _aio.EOF

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class Stream(Protocol[Request, Response]):
    """A bidirectional stream. One task writes, one task reads.

    Cancelling a task inside `read` or `write` ends the stream.
    """

    async def write(self, request: Request) -> None:
        """Sends one message. Raises UnavailableError when the stream is over."""

    async def read(self) -> Response | None:
        """The next message; None when the peer ended the stream in good order."""

    def cancel(self) -> None:
        """Ends the stream now, from any state."""


VerifyStream = Stream[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse]
DraftStream = Stream[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]


class Transport(Protocol):
    """The calls a client makes. All may run many at a time."""

    @property
    def verifier_address(self) -> str:
        """Where a drafter finds the verifier's KvExchangeService; empty: it is not to read KV."""

    @property
    def has_drafter(self) -> bool:
        """Whether `draft` may be called."""

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse: ...

    def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]: ...

    def verify(self) -> VerifyStream: ...

    async def renew_lease(
        self, request: verifier_pb2.RenewLeaseRequest
    ) -> verifier_pb2.RenewLeaseResponse: ...

    async def release_cache(
        self, request: verifier_pb2.ReleaseCacheRequest
    ) -> verifier_pb2.ReleaseCacheResponse: ...

    def draft(self) -> DraftStream: ...

    async def list_drafters(self) -> drafter_pb2.ListDraftersResponse: ...

    async def close(self) -> None: ...


class GrpcTransport:
    """Talks to a verifier and, if there is one, a drafter. Connects with the first call.

    Addresses are "host:port" or "unix:/path". A bearer token goes with every call; it is refused
    where others could read it: beyond loopback without TLS. So does `paceline-client`, a random
    name of this transport: a balancer that hashes it sends all calls of a client to the verifier
    that has its caches.

    Raises:
        InvalidRequestError: the token would travel in the open, or a TLS file cannot be read.
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
        self._drafter_address = drafter_address
        self._metadata = (
            (CLIENT_HEADER, secrets.token_hex(8)),
            *([("authorization", f"Bearer {token}")] if token else []),
        )
        self._credentials = _credentials(tls) if tls else None
        self._options = _channel_options(max_message_bytes, tls.server_name if tls else None)
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
        return self._channel(self._drafter_address or "")

    def _channel(self, address: str) -> Any:
        """A channel, bound to the running event loop: hence not made before the first call."""
        if self._credentials is None:
            channel = _aio.insecure_channel(address, options=self._options)
        else:
            channel = _aio.secure_channel(address, self._credentials, options=self._options)
        self._channels.append(channel)
        return channel

    async def get_model(
        self, request: verifier_pb2.GetModelRequest
    ) -> verifier_pb2.GetModelResponse:
        with rpc_errors:
            model: verifier_pb2.GetModelResponse = await self._verifier.GetModel(
                request, metadata=(*self._metadata, *current_metadata())
            )
            return model

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        with rpc_errors:
            call = self._verifier.CreateCache(request, metadata=self._metadata)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    def verify(self) -> VerifyStream:
        return _GrpcStream(self._verifier.Verify(metadata=self._metadata))

    async def renew_lease(
        self, request: verifier_pb2.RenewLeaseRequest
    ) -> verifier_pb2.RenewLeaseResponse:
        with rpc_errors:
            lease: verifier_pb2.RenewLeaseResponse = await self._verifier.RenewLease(
                request, metadata=(*self._metadata, *current_metadata())
            )
            return lease

    async def release_cache(
        self, request: verifier_pb2.ReleaseCacheRequest
    ) -> verifier_pb2.ReleaseCacheResponse:
        with rpc_errors:
            release: verifier_pb2.ReleaseCacheResponse = await self._verifier.ReleaseCache(
                request, metadata=(*self._metadata, *current_metadata())
            )
            return release

    def draft(self) -> DraftStream:
        return _GrpcStream(self._drafter.Draft(metadata=self._metadata))

    async def list_drafters(self) -> drafter_pb2.ListDraftersResponse:
        with rpc_errors:
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
        with rpc_errors:
            await self._call.write(request)

    async def read(self) -> Response | None:
        with rpc_errors:
            response = await self._call.read()
        return None if response is _EOF else response

    def cancel(self) -> None:
        self._call.cancel()


def _channel_options(max_message_bytes: int, server_name: str | None) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A peer that vanished without a word is noticed within 40 seconds.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A service that restarts is found again quickly: our own back-off bounds the attempts.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Two clients in one process are two clients: neither waits in the other's back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def _credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(
            root_certificates=tls.ca.read_bytes() if tls.ca else None,
            private_key=tls.key.read_bytes() if tls.key else None,
            certificate_chain=tls.cert.read_bytes() if tls.cert else None,
        )
    except OSError as error:
        raise InvalidRequestError(f"cannot read a TLS file: {error}") from error


def _is_local(address: str) -> bool:
    """Whether what is sent there stays on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
