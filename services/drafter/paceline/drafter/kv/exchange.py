"""The drafter's side of the KvExchangeService."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.errors import KvGone, KvNotShared, VerifierSilent
from paceline.drafter.kv.wanted import MOST_POSITIONS, POLICIES, WIRES, KvOptions
from paceline.service.locality import is_local_address
from paceline.telemetry.tracing import current_metadata
from paceline.v1 import kv_pb2, kv_pb2_grpc

if TYPE_CHECKING:
    from paceline.drafter.kv.chosen import ChosenKv
    from paceline.drafter.kv.device import DeviceKv
    from paceline.drafter.kv.followed import FollowedKv
    from paceline.drafter.kv.followed_states import FollowedStates
    from paceline.drafter.kv.shared import SharedKv
    from paceline.drafter.kv.states import SharedStates

logger = logging.getLogger("paceline.drafter")

CALL_SECONDS = 2.0
"""An attach waits no longer for its verifier."""

MAX_CHANNELS = 8
"""Verifiers a drafter stays connected to; clients name them, so their number must have a limit."""

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 4 << 20),
    # The address comes from a client: it must lead where it says, and one's back-off is not
    # another's.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A link that is dead must be known to be: nothing is written on it for as long as it is.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class KvExchange:
    """Maps caches of verifiers on this machine, and follows those of others it was told of.

    Belongs to one event loop.
    """

    def __init__(self, access: VerifierAccess, device: str = "cpu") -> None:
        """Make an exchange without connections.

        Args:
            access: How to show oneself to verifiers.
            device: Where the drafter computes, which is where KV on a GPU must be readable.

        Raises:
            OptionsError: The TLS authorities cannot be read.
            OSError: Another TLS file cannot be read.
        """
        self._device = device
        self._metadata = access.metadata()
        self._remote = frozenset(access.remote)
        self._beside = access.beside
        self._credentials = access.credentials()
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._told = ""

    async def open(
        self,
        address: str,
        read_grant: bytes,
        layers: Sequence[int],
        options: KvOptions,
        budget: int,
    ) -> SharedKv | DeviceKv | ChosenKv | FollowedKv:
        """Map layers of a cache or follow them, as the options say. Whoever asked closes it.

        Args:
            address: Of the verifier: ``unix:/path``, ``host:port`` on the loopback, or one of
                ``VerifierAccess.remote``. With ``VerifierAccess.beside`` it does not matter.
            read_grant: As the verifier gave it out.
            layers: At least one; negative ones count from the last.
            options: The method's.
            budget: Positions to follow at most at the beginning; 0: all.

        Raises:
            KvNotShared: The verifier is somewhere else, does not answer in time, or refuses.
        """
        address = self._beside or address
        if options.kv == "follow":
            return await self.follow_cache(address, read_grant, layers, options, budget)
        try:
            return await self._map_chosen(address, read_grant, layers, options, budget)
        except VerifierSilent:
            raise
        except KvNotShared as error:
            if options.kv == "map":
                raise
            not_mapped = error
        self._tell(f"following the KV of {address}, since it cannot be mapped: {not_mapped}")
        try:
            return await self.follow_cache(address, read_grant, layers, options, budget)
        except KvNotShared as error:
            raise KvNotShared(f"{not_mapped}; nor can it be followed: {error}") from error

    async def follow_cache(
        self,
        address: str,
        read_grant: bytes,
        layers: Sequence[int],
        options: KvOptions,
        budget: int,
    ) -> FollowedKv:
        """Follow chosen positions of layers. See :meth:`open`."""
        from paceline.drafter.kv.followed import FollowedKv

        self._check_known(address)
        subscribe = kv_pb2.FollowSubscribe(
            read_grant=read_grant,
            layers=layers,
            budget=budget or MOST_POSITIONS,
            policy=POLICIES[options.kv_policy],
            wire_dtype=WIRES[options.kv_wire],
        )
        return await FollowedKv.open(self._following(address), subscribe, CALL_SECONDS)

    async def map_cache(
        self, address: str, read_grant: bytes, layers: Sequence[int]
    ) -> SharedKv | DeviceKv:
        """Map layers of the cache of a read grant. Whoever asked closes it.

        Negative layers count from the last: since only the verifier knows how many there are, it
        is then asked for all, of which no more than those wanted are looked at.

        Args:
            address: Of the verifier: ``unix:/path``, or ``host:port`` on the loopback.
            read_grant: As the verifier gave it out.
            layers: At least one.

        Raises:
            KvNotShared: The verifier is elsewhere, refuses, or describes what cannot be mapped;
                as VerifierSilent, it does not answer in time.
        """
        # Here, since drafters that read no KV need no torch.
        from paceline.drafter.kv.shared import SharedKv

        _check_local(address)
        every = any(layer < 0 for layer in layers)
        request = kv_pb2.MapCacheRequest(
            read_grant=read_grant, layers=() if every else sorted(set(layers))
        )
        response = await self._call(address, request)
        if response.segments and response.segments[0].WhichOneof("memory") == "cuda_ipc":
            from paceline.drafter.kv.device import map_device

            return map_device(response, read_grant, layers, self._device)
        return SharedKv.open(response, read_grant, layers)

    async def _map_chosen(
        self,
        address: str,
        read_grant: bytes,
        layers: Sequence[int],
        options: KvOptions,
        budget: int,
    ) -> SharedKv | DeviceKv | ChosenKv:
        """Map layers and, where a policy of the verifier's is to choose, follow its choice."""
        mapped = await self.map_cache(address, read_grant, layers)
        if options.kv_policy == "streaming" or not budget:
            return mapped
        from paceline.drafter.kv.chosen import ChosenKv, ChosenPositions

        subscribe = kv_pb2.FollowSubscribe(
            read_grant=read_grant,
            layers=layers,
            budget=budget,
            policy=POLICIES[options.kv_policy],
            positions_only=True,
        )
        try:
            chosen = await ChosenPositions.open(self._following(address), subscribe, CALL_SECONDS)
        except BaseException:
            mapped.close()
            raise
        return ChosenKv(mapped, chosen)

    def _following(self, address: str) -> Callable[[], Any]:
        """What opens a FollowCache call."""

        def connect() -> Any:
            if self._closed:
                raise KvGone("the drafter is stopping")
            stub: Any = kv_pb2_grpc.KvExchangeServiceStub(self._channel(address))
            return stub.FollowCache(metadata=self._metadata)

        return connect

    def _tell(self, message: str) -> None:
        """Log it, unless it was the last thing said: each attach would say the same."""
        logger.log(logging.DEBUG if message == self._told else logging.INFO, message)
        self._told = message

    def _check_known(self, address: str) -> None:
        if not is_local_address(address) and address not in self._remote:
            raise KvNotShared(
                f"the verifier's address {address[:80]} is not on this machine, and not one that "
                "this drafter was told of; start it with --verifier ADDRESS to have it followed"
            )

    async def open_states(
        self,
        address: str,
        read_grant: bytes,
        layers: Sequence[int],
        window: int,
        transport: str = "auto",
    ) -> SharedStates | FollowedStates:
        """Map hidden states of a cache that keeps them, or follow them. Whoever asked closes it.

        Args:
            address: As for :meth:`open`.
            read_grant: As the verifier gave it out.
            layers: At least one, 0 for the first.
            window: Positions before the committed length that are read at most; 0: all.
            transport: map, follow, or auto: map where that works.

        Raises:
            KvNotShared: The verifier is somewhere else, does not answer in time, or refuses, or
                the cache does not keep them.
        """
        address = self._beside or address
        if transport == "follow":
            return await self.follow_states(address, read_grant, layers, window)
        try:
            return await self.map_states(address, read_grant, layers, window)
        except VerifierSilent:
            raise
        except KvNotShared as error:
            if transport == "map":
                raise
            not_mapped = error
        try:
            return await self.follow_states(address, read_grant, layers, window)
        except KvNotShared as error:
            raise KvNotShared(f"{not_mapped}; nor can it be followed: {error}") from error

    async def follow_states(
        self, address: str, read_grant: bytes, layers: Sequence[int], window: int
    ) -> FollowedStates:
        """Follow hidden states. See :meth:`open_states`."""
        from paceline.drafter.kv.followed_states import FollowedStates

        self._check_known(address)
        subscribe = kv_pb2.FollowSubscribe(
            read_grant=read_grant, hidden_state_layers=layers, hidden_state_window=window
        )
        return await FollowedStates.open(self._following(address), subscribe, CALL_SECONDS)

    async def map_states(
        self, address: str, read_grant: bytes, layers: Sequence[int], window: int
    ) -> SharedStates:
        """Map hidden states of a cache that keeps them. Whoever asked closes it.

        Args:
            address: Of the verifier: ``unix:/path``, or ``host:port`` on the loopback.
            read_grant: As the verifier gave it out.
            layers: At least one, 0 for the first.
            window: Positions before the committed length that are read at most; 0: all.

        Raises:
            KvNotShared: As for :meth:`map_cache`, or the cache does not keep them.
        """
        from paceline.drafter.kv.states import SharedStates

        _check_local(address)
        request = kv_pb2.MapCacheRequest(read_grant=read_grant, hidden_state_layers=layers)
        return SharedStates.open(await self._call(address, request), read_grant, layers, window)

    async def close(self) -> None:
        """Close all connections; what is followed stays as it is."""
        self._closed = True
        while self._channels:
            await self._channels.popitem()[1].close()
        await asyncio.gather(*self._closing)

    async def _call(self, address: str, request: kv_pb2.MapCacheRequest) -> kv_pb2.MapCacheResponse:
        stub: Any = kv_pb2_grpc.KvExchangeServiceStub(self._channel(address))
        try:
            response: kv_pb2.MapCacheResponse = await stub.MapCache(
                request, timeout=CALL_SECONDS, metadata=(*self._metadata, *current_metadata())
            )
        except grpc.aio.AioRpcError as error:
            said = (
                f"the verifier at {address} did not share its KV: "
                f"{error.code().name}: {error.details()}"
            )
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                self._drop(address)  # so that the next attach connects without a back-off
                raise VerifierSilent(said) from error
            raise KvNotShared(said) from error
        return response

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            while len(self._channels) >= MAX_CHANNELS:
                self._drop(next(iter(self._channels)))
            self._channels[address] = self._connect(address)
        self._channels.move_to_end(address)
        return self._channels[address]

    def _connect(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)

    def _drop(self, address: str) -> None:
        """Forget a channel; calls in flight on it may still end."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            task = asyncio.create_task(channel.close(CALL_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _check_local(address: str) -> None:
    if not is_local_address(address):
        raise KvNotShared(
            f"the verifier's address {address[:80]} is not on this machine; name it by "
            "unix:/path or a loopback address"
        )
