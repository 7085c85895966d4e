"""The models that a gateway serves: its verifiers' model, or several, which `paceline serve`
loads when they are asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from paceline.client import Client, UnavailableError

from .errors import ApiError

_LINE_BYTES = 1 << 20  # maximum length of what `paceline serve` says, in bytes


class Models(Protocol):
    """What a gateway serves, by name."""

    @property
    def clients(self) -> Sequence[Client]:
        """A client of each loaded model."""

    @property
    def states(self) -> Mapping[str, str]:
        """The state of each model, such as "loaded"; empty if the only one is always loaded."""

    async def names(self) -> Sequence[str]:
        """Return all names; a request without one gets the first. Raises PacelineError if no
        service answers."""

    async def acquire(self, name: str, hold: ExitStack, *, load: bool = True) -> Client:
        """Return the client of a model, which stays loaded until `hold` is closed. If `load`, it is
        loaded first. Raises ApiError if it is not loaded then."""


class OneModel:
    """The model of a verifier or a fleet, under a name or its own."""

    def __init__(self, client: Client, name: str | None = None) -> None:
        self._client, self._name = client, name
        self.clients = [client]
        self.states: dict[str, str] = {}

    async def names(self) -> Sequence[str]:
        served = await self._client.model()
        return [self._name or served.facts.name]

    async def acquire(self, name: str, hold: ExitStack, *, load: bool = True) -> Client:
        return self._client


class ManagedModels:
    """The models of a `paceline serve` that has several. Enter it to ask which.

    `paceline serve` listens on a Unix socket. A connection begins with a line of JSON: the `model`
    that stays loaded while the connection lasts, and whether to `load` it; or null. The former is
    answered with an empty line when the model is loaded; a line with words says why it is not, or
    no longer. The latter gets a line with address and state of all models, and another one whenever
    a state changes.

    Args:
        socket: Path of the socket.
        client_of: Makes a client of the verifier at an address.
    """

    def __init__(self, socket: Path, client_of: Callable[[str], Client]) -> None:
        self._socket, self._client_of = socket, client_of
        self._clients: dict[str, Client] = {}
        self._addresses: dict[str, str] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.states: dict[str, str] = {}
        self._watching: asyncio.Task[None] | None = None
        self._open = ExitStack()

    async def __aenter__(self) -> Self:
        reader = await self._ask(None, self._open)
        self._read_states(await reader.readline())
        self._watching = asyncio.create_task(self._watch(reader))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._open.close()
        for client in self._clients.values():
            await client.aclose()

    @property
    def clients(self) -> Sequence[Client]:
        unloaded = ("unloaded", "loading")
        return [
            client for name, client in self._clients.items() if self.states[name] not in unloaded
        ]

    async def names(self) -> Sequence[str]:
        if self._watching is None or self._watching.done():
            raise UnavailableError("`paceline serve`, which loads the models, has ended")
        return list(self.states)

    async def acquire(self, name: str, hold: ExitStack, *, load: bool = True) -> Client:
        reader = await self._ask({"model": name, "load": load}, hold)
        if reason := _reason(await reader.readline()):
            raise ApiError(
                503, f"{name} is not served: {reason}", kind="server_error", code="model_not_loaded"
            )
        client = self._clients[name]
        ended = asyncio.create_task(self._end_with(client, name, reader))
        hold.callback(ended.cancel)
        return client

    async def _ask(self, question: object, hold: ExitStack) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=_LINE_BYTES)
        hold.callback(writer.close)
        writer.write(f"{json.dumps(question)}\n".encode())
        return reader

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._read_states(line)

    def _read_states(self, line: bytes) -> None:
        for name, (self._addresses[name], self.states[name]) in json.loads(line).items():
            if name not in self._clients:
                self._clients[name] = self._client_of(self._addresses[name])

    async def _end_with(self, client: Client, name: str, reader: asyncio.StreamReader) -> None:
        """End what was asked of a model when it is no longer loaded, which it is while that lasts.

        Its client is closed, so that a request that has not begun its text does not wait for one.
        """
        reason = _reason(await reader.readline())
        if self._clients[name] is client:  # this request is the first that knows
            self._clients[name] = self._client_of(self._addresses[name])
            client.fail(f"{name} is no longer served: {reason}")
            closing = asyncio.create_task(client.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _reason(line: bytes) -> str:
    """Return why a model is not loaded; empty if it is."""
    return line.decode().strip() if line else "`paceline serve` has ended"
