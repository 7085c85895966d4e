"""Hidden states of the target that drafters read. A cache must keep them from the prefill on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.v1 import drafter_pb2

from ._errors import PacelineError
from ._transport import DrafterTransport

# Longest wait for the list of drafters when a generation starts. Unit: seconds.
_TIMEOUT = 1.0


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states that a cache keeps; none by default."""

    layers: tuple[int, ...] = ()
    """Target layers, 0 for the first."""
    window: int = 0
    """Number of positions before the committed length; 0: all. Unit: tokens."""


class HiddenStateSource:
    """The hidden states of each drafter, requested once and updated when it is attached."""

    def __init__(self, transport: DrafterTransport) -> None:
        self._transport = transport
        self._known: dict[str, HiddenStates] = {}
        self._lock = asyncio.Lock()

    async def get(self, drafter: str) -> HiddenStates:
        """Hidden states of a drafter by its name; none if the service cannot be reached."""
        if drafter not in self._known:
            async with self._lock:
                if drafter not in self._known:
                    self._known[drafter] = await self._request(drafter)
        return self._known.get(drafter, HiddenStates())

    def learn(self, drafter: str, attached: drafter_pb2.DraftAttached) -> None:
        """Updates a drafter from its reply to an attachment."""
        layers = tuple(attached.hidden_state_layers)
        self._known[drafter] = HiddenStates(layers, attached.hidden_state_window)

    def forget(self, drafter: str) -> None:
        """Makes the next `get` request the hidden states again, after a failure."""
        self._known.pop(drafter, None)

    async def _request(self, drafter: str) -> HiddenStates:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return _hidden_states(await self._transport.list_drafters(), drafter)
        except (PacelineError, TimeoutError):
            return HiddenStates()  # `learn` or `forget` follows


def split_version(drafter: str) -> tuple[str, str]:
    """Name and version of `NAME@VERSION`; either may be empty, for the default."""
    name, _, version = drafter.partition("@")
    return name, version


def _hidden_states(listed: drafter_pb2.ListDraftersResponse, drafter: str) -> HiddenStates:
    """The union of the hidden states of all versions that a generation may be routed to."""
    name, version = split_version(drafter)
    active = [
        info
        for info in listed.drafters
        if info.name == (name or listed.default_drafter)
        and (info.version == version if version else info.traffic_share > 0)
        and info.hidden_state_layers
    ]
    windows = [info.hidden_state_window for info in active]
    return HiddenStates(
        tuple(sorted({layer for info in active for layer in info.hidden_state_layers})),
        max(windows) if windows and all(windows) else 0,
    )
