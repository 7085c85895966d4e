"""Which of the target's hidden states drafters read: a cache keeps them from its first token on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.v1 import drafter_pb2

from ._errors import PacelineError
from ._transport import Transport

# The first generations with a drafter wait no longer for its answer. Unit: seconds.
_TIMEOUT = 1.0


@dataclass(frozen=True)
class Taps:
    """Hidden states that a cache is to keep."""

    layers: tuple[int, ...] = ()
    """Target layers, 0 for the first."""
    window: int = 0
    """Only so many positions before the committed length; 0: all. Unit: tokens."""


NO_TAPS = Taps()


class TapSource:
    """What each drafter reads: asked of it once, and kept fresh by what it says when attached."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[str, Taps] = {}
        self._asking = asyncio.Lock()

    async def get(self, drafter: str) -> Taps:
        """What a drafter reads, by its name; nothing where it cannot be asked."""
        if drafter not in self._known:
            async with self._asking:
                if drafter not in self._known:
                    self._known[drafter] = await self._ask(drafter)
        return self._known.get(drafter, NO_TAPS)

    def learn(self, drafter: str, attached: drafter_pb2.DraftAttached) -> None:
        """A drafter was attached: this version's needs are what the next cache is made for."""
        layers = tuple(attached.hidden_state_layers)
        self._known[drafter] = Taps(layers, attached.hidden_state_window)

    def forget(self, drafter: str) -> None:
        """A drafter refused: perhaps it reads something else by now."""
        self._known.pop(drafter, None)

    async def _ask(self, drafter: str) -> Taps:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return _taps_of(await self._transport.list_drafters(), drafter)
        except (PacelineError, TimeoutError):
            return NO_TAPS  # until it is attached, or fails to be


def split_version(drafter: str) -> tuple[str, str]:
    """Name and version of `NAME@VERSION`; either may be empty, for the default."""
    name, _, version = drafter.partition("@")
    return name, version


def _taps_of(listed: drafter_pb2.ListDraftersResponse, drafter: str) -> Taps:
    """All that the versions of a drafter read that a generation may get."""
    name, version = split_version(drafter)
    active = [
        info
        for info in listed.drafters
        if info.name == (name or listed.default_drafter)
        and (info.version == version if version else info.traffic_share > 0)
        and info.hidden_state_layers
    ]
    if not active:
        return NO_TAPS
    windows = [info.hidden_state_window for info in active]
    return Taps(
        tuple(sorted({layer for info in active for layer in info.hidden_state_layers})),
        max(windows) if all(windows) else 0,
    )
