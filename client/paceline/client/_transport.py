"""The calls of a client to a verifier, by gRPC.

A transport raises exceptions of this package only.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any, ClassVar

import grpc

from paceline.telemetry.tracing import current_metadata
from paceline.tokens import TokenError, certified_name, check_encrypted, is_local, local_token
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

from ._errors import InvalidRequestError, rpc_errors
from ._options import TlsOptions

DNS = "dns:///"
_FORMS = re.compile(r"(unix|unix-abstract|ipv4|ipv6|vsock):.+|([\w.-]+|\[[\w.:%]+\]):([0-9]{1,5})")

CLIENT_HEADER = "paceline-client"  # metadata key of a client's random name; load balancers hash it

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


def parse_addresses(text: str, kind: str) -> tuple[str, ...]:
    """Return a list's entries: "host:port", "unix:/path" or "dns:///name:port", comma-separated.

    `kind` is what the addresses are of, for the error: "verifier" or "drafter". Raises
    InvalidRequestError if an entry is empty, repeated, or of another form.
    """
    param = {"param": f"{kind}_address"}
    # Another type may be an int with too many digits to print.
    given = text if isinstance(text, str) else f"<{type(text).__name__}>"
    entries = tuple(entry.strip() for entry in given.split(","))
    for entry in entries:
        form = _FORMS.fullmatch(entry.removeprefix(DNS))
        if form is None or not 0 < int(form[3] or 1) < 2**16:
            raise InvalidRequestError(
                f"{entry!r} is not the address of a {kind}: give host:port with a port of 1 to "
                "65535, unix:/path or dns:///name:port, several separated by commas",
                metadata=param,
            )
    if len(set(entries)) < len(entries):
        raise InvalidRequestError(
            f"{text!r} has the address of a {kind} twice: give each once", metadata=param
        )
    return entries


async def addresses_of(entry: str) -> dict[str, str]:
    """Return the addresses of an entry, with the DNS name that each was resolved from; empty for
    none. Raises OSError if the name cannot be resolved."""
    if not entry.startswith(DNS):
        return {entry: ""}
    name, _, port = entry.removeprefix(DNS).rpartition(":")
    return dict.fromkeys(await _lookup(name.strip("[]"), int(port)), name)


async def _lookup(name: str, port: int) -> list[str]:
    """Return a name's addresses, only IPv4 ones if it has any. Raises OSError if it has none."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = [(family, address[0]) for family, *_, address in infos]
    ipv4 = [f"{host}:{port}" for family, host in hosts if family == socket.AF_INET]
    return ipv4 or [f"[{host}]:{port}" for _, host in hosts]


class Connections:
    """How a client connects to its services.

    Every call carries the bearer token, which is refused without TLS beyond loopback, or the one
    that `paceline serve` has made for an address of this machine. In `paceline-client` it carries a
    random name of the client: a load balancer that hashes the name sends all calls of a client to
    the verifier with its caches. Raises InvalidRequestError if a TLS file cannot be read.
    """

    pid: ClassVar[int | None] = None  # of the first channel: gRPC works in no fork of the process

    def __init__(
        self,
        token: str | None = None,
        tls: TlsOptions | None = None,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        self._token, self._tls = token, tls
        self._name = (CLIENT_HEADER, secrets.token_hex(8))
        self._credentials = tls.credentials() if tls else None
        self._options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *_CHANNEL_OPTIONS,
        ]

    def __repr__(self) -> str:
        return f"<Connections {'with' if self._tls else 'without'} TLS>"

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call to an address. Without a token, it has the token of a
        service of this user, which is another one after each start."""
        token = self._token or local_token(address)
        return self._name, *([("authorization", f"Bearer {token}")] if token else [])

    def check(self, address: str) -> None:
        """Raises InvalidRequestError if the token would travel to an address unencrypted."""
        try:
            check_encrypted(address, self._token, tls=self._tls is not None)
        except TokenError as error:
            raise InvalidRequestError(f"{error}, by tls=TlsOptions(...)") from None

    def channel(self, address: str, name: str) -> Any:
        """Return a channel, which binds to the running event loop.

        Args:
            address: "host:port" or "unix:/path".
            name: DNS name that was resolved to the address: its certificate has this name, or the
                `server_name` of the TLS options; empty: the address's, "localhost" for a
                Unix socket.
        """
        Connections.pid = Connections.pid or os.getpid()
        options = list(self._options)
        if is_local(address):
            # gRPC else sends calls to the proxy that the environment names.
            options.append(("grpc.enable_http_proxy", 0))
        if self._credentials is None or self._tls is None:
            return _aio.insecure_channel(address, options=options)
        if expected := self._tls.server_name or name or certified_name(address):
            options.append(("grpc.ssl_target_name_override", expected))
        return _aio.secure_channel(address, self._credentials, options=options)


class Transport:
    """Calls one verifier; `address` and `name` as of `Connections.channel`. Connects with the first
    call."""

    def __init__(self, connections: Connections, address: str, name: str = "") -> None:
        self.address = address
        self._connections = connections
        self._name = name

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._connections.metadata(self.address)

    @cached_property
    def _channel(self) -> Any:
        return self._connections.channel(self.address, self._name)

    async def _unary(self, method: Any, request: Any) -> Any:
        with rpc_errors("verifier", self.address):
            return await method(request, metadata=(*self._metadata, *current_metadata()))

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
        with rpc_errors("verifier", self.address):
            call = self._verifier.CreateCache(request, metadata=self._metadata)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    def generate(self) -> GenerateStream:
        return GenerateStream(self._verifier.Generate(metadata=self._metadata), self.address)

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None:
        await self._unary(self._verifier.RenewLease, request)

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        await self._unary(self._verifier.ReleaseCache, request)

    async def close(self) -> None:
        if "_channel" in self.__dict__:
            await self._channel.close()


class GenerateStream:
    """The stream of a generation. One task writes, one task reads.

    Cancelling a task inside `read` or `write` ends the stream.
    """

    __slots__ = ("_address", "_call")

    def __init__(self, call: Any, address: str) -> None:
        self._call, self._address = call, address

    async def write(self, request: verifier_pb2.GenerateRequest) -> None:
        """Send one message. Raises UnavailableError if the stream has ended."""
        with rpc_errors("verifier", self._address):
            await self._call.write(request)

    async def read(self) -> verifier_pb2.GenerateResponse | None:
        """Return the next message; None if the peer ended the stream without an error."""
        with rpc_errors("verifier", self._address):
            response = await self._call.read()
        return None if response is _EOF else response

    def cancel(self) -> None:
        """End the stream, in any state."""
        self._call.cancel()
