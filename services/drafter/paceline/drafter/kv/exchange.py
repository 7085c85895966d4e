"""Channels to verifiers, and readers of their KV and hidden states (KvExchangeService)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from paceline.device import CPU, Device
from paceline.drafter.kv import KvGone, KvNotShared, KvOptions, VerifierUnreachable
from paceline.kv.policies import STREAMING
from paceline.service import limits
from paceline.service.exchange import request_files
from paceline.service.interceptor import check_authorities
from paceline.service.options import OptionsError
from paceline.tokens import TokenError, certified_name, check_encrypted, local_token
from paceline.v1 import kv_pb2, kv_pb2_grpc

if TYPE_CHECKING:
    # They import torch, which drafters that read no KV do not need.
    from paceline.drafter.kv.cuda import CudaKv
    from paceline.drafter.kv.mapped import CacheFile, SharedKv
    from paceline.drafter.kv.reader import KvReader, StateReader

logger = logging.getLogger("paceline.drafter")

CALL_SECONDS = 2.0  # longest wait for a verifier when a sequence is opened
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", limits.VERIFIER_FRAME_BYTES),
    ("grpc.max_send_message_length", limits.VERIFIER_FRAME_BYTES),
    # No proxy, and no back-off shared with other channels.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Detects a dead link also while nothing is written to it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

_Reader = TypeVar("_Reader")


@dataclass(frozen=True)
class VerifierAccess:
    """Token and TLS for calls to verifiers."""

    token: str | None = None  # bearer token of the deployment
    tls_ca: Path | None = None  # PEM authorities of the verifiers' TLS; None: no TLS
    tls_cert: Path | None = None  # PEM client certificate, for verifiers that require one
    tls_key: Path | None = None  # PEM key of the certificate

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call to an address. Without a token, this user's for a
        local service is taken. Raises ``TokenError``: it would travel unencrypted."""
        check_encrypted(address, self.token, tls=self.tls_ca is not None)
        token = self.token or local_token(address)
        return (("authorization", f"Bearer {token}"),) if token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return TLS credentials, or None for plain connections. Raises ``OptionsError`` if
        ``tls_ca`` cannot be read, or holds no certificate, and ``OSError`` if another file cannot
        be read."""
        if self.tls_ca is None:
            return None
        check_authorities(self.tls_ca)
        return grpc.ssl_channel_credentials(
            root_certificates=self.tls_ca.read_bytes(),
            private_key=self.tls_key.read_bytes() if self.tls_key else None,
            certificate_chain=self.tls_cert.read_bytes() if self.tls_cert else None,
        )


class KvExchange:
    """Maps caches of verifiers whose Unix socket can be opened, and follows other verifiers'.

    It has one channel to each verifier, which serves all calls to it. Belongs to one event loop.
    """

    def __init__(self, access: VerifierAccess, device: Device = CPU) -> None:
        """Make an exchange without connections.

        ``device`` is the drafters' device, which has to be able to read KV on a GPU. Raises
        ``OptionsError`` if the TLS authorities cannot be read, and ``OSError`` if another TLS file
        cannot be read.
        """
        self._device = device
        self.metadata = access.metadata  # metadata of every call to an address
        self._credentials = access.credentials()
        # Unix sockets, by address, of verifiers that were joined over one.
        self.sockets: dict[str, str] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._logged = ""

    def check(self, address: str) -> None:
        """Raises ``OptionsError`` if the token would travel to an address unencrypted."""
        try:
            self.metadata(address)
        except TokenError as error:
            raise OptionsError(f"{error}, by --verifier-tls-ca") from None

    async def open(
        self,
        address: str,
        read_grant: bytes,
        layers: Sequence[int],
        options: KvOptions,
        budget: int,
    ) -> KvReader:
        """Open keys and values of a cache at ``unix:/path`` or ``host:port``; the caller closes
        the reader. Negative layers count from the last; a ``budget`` of 0 is for all positions.
        Raises ``KvNotShared`` if the verifier does not answer in time, or refuses."""
        from paceline.drafter.kv.remote import MAX_POSITIONS, RemoteKv, SparseView

        async def follow(*, positions_only: bool = False) -> RemoteKv:
            subscribe = kv_pb2.FollowSubscribe(
                read_grant=read_grant,
                layers=layers,
                budget=budget or MAX_POSITIONS,
                policy=options.kv_policy,
                positions_only=positions_only,
            )
            return await RemoteKv.open(partial(self._follow, address), subscribe, CALL_SECONDS)

        async def map_kv() -> KvReader:
            """Map layers, and follow the verifier's selection if the policy needs it."""
            mapped = await self.map_cache(address, read_grant, layers)
            if options.kv_policy == STREAMING or not budget:
                return mapped
            try:
                return SparseView(mapped, await follow(positions_only=True))
            except BaseException:
                mapped.close()
                raise

        return await self._open(options.kv, map_kv, follow)

    async def open_states(
        self,
        address: str,
        read_grant: bytes,
        layers: Sequence[int],
        window: int,
        transport: str = "auto",
    ) -> StateReader:
        """Open hidden states of a cache; the caller closes the reader. Layers are counted from 0,
        in the order in which they are read; a ``window`` of 0 is for all positions. Raises
        ``KvNotShared`` as :meth:`open`, or if the cache does not keep them."""
        from paceline.drafter.kv.cuda import CudaStates
        from paceline.drafter.kv.mapped import SharedStates
        from paceline.drafter.kv.remote import RemoteStates

        def read(file: CacheFile) -> StateReader:
            if not file.paged:
                return SharedStates(file, layers, window)
            return CudaStates(file, layers, window, self._device)

        async def map_states() -> StateReader:
            return await self._map(address, read_grant, read)

        async def follow_states() -> StateReader:
            subscribe = kv_pb2.FollowSubscribe(
                read_grant=read_grant, hidden_state_layers=layers, hidden_state_window=window
            )
            return await RemoteStates.open(partial(self._follow, address), subscribe, CALL_SECONDS)

        return await self._open(transport, map_states, follow_states)

    async def _open(
        self,
        transport: str,
        map_cache: Callable[[], Awaitable[_Reader]],
        follow: Callable[[], Awaitable[_Reader]],
    ) -> _Reader:
        """Map or follow; if ``transport`` is auto, follow what cannot be mapped."""
        if transport == "follow":
            return await follow()
        try:
            return await map_cache()
        except VerifierUnreachable:
            raise
        except KvNotShared as error:
            if transport == "map":
                raise
            not_mapped = error
        message = f"following the cache, since it cannot be mapped: {not_mapped}"
        logger.log(logging.DEBUG if message == self._logged else logging.INFO, message)
        self._logged = message  # not again for each generation
        try:
            return await follow()
        except KvNotShared as error:
            raise KvNotShared(f"{not_mapped}; nor can it be followed: {error}") from error

    async def map_cache(
        self, address: str, read_grant: bytes, layers: Sequence[int]
    ) -> SharedKv | CudaKv:
        """Map keys and values of a cache. See :meth:`open`."""
        from paceline.drafter.kv.cuda import CudaKv
        from paceline.drafter.kv.mapped import SharedKv

        def read(file: CacheFile) -> SharedKv | CudaKv:
            if not file.paged:
                return SharedKv(file, layers)
            return CudaKv(file, layers, self._device)

        return await self._map(address, read_grant, read)

    async def close(self) -> None:
        """Close all connections. Open readers keep what they have."""
        self._closed = True
        while self._channels:
            await self._channels.popitem()[1].close()
        await asyncio.gather(*self._closing)
        self._device.close_unused()

    def _follow(self, address: str) -> Any:
        """Open a FollowCache call."""
        if self._closed:
            raise KvGone("the drafter is stopping")
        stub: Any = kv_pb2_grpc.KvExchangeServiceStub(self.channel(address))
        return stub.FollowCache(metadata=self.metadata(address))

    async def _map(
        self, address: str, read_grant: bytes, read: Callable[[CacheFile], _Reader]
    ) -> _Reader:
        """Map a cache over the Unix socket of the draft exchange, and make its reader."""
        path = self.sockets.get(address)
        if path is None:
            raise KvNotShared(
                f"the verifier at {address[:80]} was joined without its Unix socket; run both on "
                "one host, and let them share the folder of --draft-socket"
            )
        # In a thread: its result frees itself if nobody waits for it any more.
        file = await asyncio.to_thread(_map_file, path, read_grant, CALL_SECONDS)
        try:
            return read(file)
        except BaseException:
            file.close()
            raise

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel to a verifier, which is opened if there is none."""
        if address not in self._channels:
            options = list(_OPTIONS)
            if name := certified_name(address):
                options.append(("grpc.ssl_target_name_override", name))
            self._channels[address] = (
                grpc.aio.insecure_channel(address, options=options)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, options=options)
            )
        return self._channels[address]

    def drop(self, address: str) -> None:
        """Forget a verifier whose sequences are closed; calls in flight may still end."""
        self.sockets.pop(address, None)
        self._device.close_unused()
        channel = self._channels.pop(address, None)
        if channel is not None:
            task = asyncio.create_task(channel.close(CALL_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _map_file(path: str, read_grant: bytes, seconds: float) -> CacheFile:
    from paceline.drafter.kv.mapped import CacheFile

    try:
        files = request_files(path, read_grant, seconds)
    except OSError as error:
        raise VerifierUnreachable(
            f"the verifier did not share its KV: {error or type(error).__name__}"
        ) from error
    if not files:
        raise KvNotShared("the verifier did not share its KV: no cache has this read grant")
    return CacheFile(*files)
