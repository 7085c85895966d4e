"""The DraftExchangeService: drafter services join here."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Protocol

import grpc

from paceline.service import OptionsError, ServiceError, limits
from paceline.service.exchange import FramedSocket, socket_address
from paceline.service.tasks import keep_running
from paceline.text import Text
from paceline.tree import MAX_NODES, TokenTree, TreeError
from paceline.v1 import drafter_pb2, exchange_pb2, exchange_pb2_grpc, tree_pb2, verifier_pb2
from paceline.verifier.engine.drafted import Link, eligible, hidden_states
from paceline.verifier.engine.drafting import Drafting
from paceline.verifier.kv.base import Taps
from paceline.verifier.rpc.streams import first_message
from paceline.verifier.store import CacheNotFound, CacheStore

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_ROOT = 0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer


class DraftingThread(Protocol):
    """The thread that drafts: the engine's, or another decoding engine's."""

    def drafting(self, command: Callable[[Drafting], None]) -> None:
        """Run a command on its drafter services, between two steps."""

    def with_drafting(self, command: Callable[[Drafting], None]) -> Awaitable[None]:
        """The same; returns when it was run."""


class DraftExchangeServicer(exchange_pb2_grpc.DraftExchangeServiceServicer):
    """Lets drafter services join, and hands their connections to the engine.

    A service is offered a Unix socket, which the engine thread reads itself; one that cannot open
    it uses the stream of its Join call. Who opens it shows the random token that was sent over the
    authenticated Join call. Who shows the read grant of a cache instead gets the descriptors of its
    memory. Used on the event loop.
    """

    def __init__(
        self,
        model: verifier_pb2.GetModelResponse,
        engine: DraftingThread,
        store: CacheStore | None,
        path: str | None = None,
        *,
        needs_token: bool = False,
        review: Callable[[exchange_pb2.DrafterList], None] | None = None,
    ) -> None:
        """Make a servicer; :meth:`start` opens its socket, a file ``path`` that drafter services
        must see under the same path; None: an abstract name, for the network namespace of this
        process. ``store`` has the caches that drafters may map; ``needs_token`` says that calls
        need one: then its holders may connect as other users. ``review`` removes drafters that
        cannot be used from a list, or raises ``ServiceError`` for the service."""
        self._model = model
        self._engine = engine
        self._store = store
        self.path = path or f"@paceline-{secrets.token_hex(8)}"
        self._needs_token = needs_token
        self._review = review or (lambda drafters: None)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._expected: dict[bytes, asyncio.Future[FramedSocket]] = {}
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._refused: set[int] = set()
        self._links: list[Link] = []
        # Called with the layers whose hidden states the joined drafters read, whenever a list of
        # drafters has come.
        self.on_tapped: Callable[[tuple[int, ...]], None] = lambda layers: None

    def joined(self) -> list[verifier_pb2.JoinedService]:
        """Return the services that have joined, in order."""
        return [
            verifier_pb2.JoinedService(
                drafters=link.drafters.drafters,
                default_drafter=link.drafters.default_drafter,
                carrier=f"CARRIER_{link.carrier.upper()}",
                sequences=len(link.sequences),
            )
            for link in self._links
        ]

    def taps(self, drafter: str | None) -> Taps | None:
        """Return the hidden states that a cache must keep for a drafter: NAME or NAME@VERSION;
        empty: the default; None: no drafter."""
        if drafter is None:
            return None
        layers, window = hidden_states((link.drafters for link in self._links), drafter)
        if not layers or layers[-1] >= self._model.layers:
            return None  # made for another target: the drafter refuses the sequence
        # A window as long as the context is the same as none.
        return Taps(layers, window if window < self._model.max_context else 0)

    def _list_came(self) -> None:
        """Tell which layers are read, by drafters that were made for this target."""
        layers: dict[str, set[int]] = {}
        for link in self._links:
            for drafter in link.drafters.drafters:
                if drafter.hidden_state_layers and drafter.traffic_share > 0:
                    layers.setdefault(drafter.name, set()).update(drafter.hidden_state_layers)
        made = (numbers for numbers in layers.values() if max(numbers) < self._model.layers)
        if tapped := set[int]().union(*made):
            self.on_tapped(tuple(sorted(tapped)))

    def scored(self, drafter: str | None) -> set[tuple[str, tuple[int, ...]]]:
        """Return policies that score positions for a drafter (see :meth:`taps`), and layers."""
        links = (link.drafters for link in self._links)
        drafters = eligible(links, drafter) if drafter is not None else ()
        return {(info.kv_policy, tuple(info.scored_layers)) for info in drafters if info.kv_policy}

    async def start(self) -> None:
        """Open the socket. Raises ``OptionsError`` if its path cannot be used."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            if not self.path.startswith("@"):
                _remove_dead(self.path)
            listener.bind(socket_address(self.path))
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise OptionsError(f"cannot listen on unix:{self.path}: {error.strerror}") from error
        self._listener = listener
        self._accepting = keep_running("the socket for drafters", lambda: self._accept(listener))

    async def stop(self) -> None:
        """Close the socket."""
        if self._accepting is not None:
            self._accepting.cancel()
            with suppress(asyncio.CancelledError):
                await self._accepting
        for _ in tuple(self._handshakes):
            self._end_oldest()
        if self._listener is not None:
            self._listener.close()
            if not self.path.startswith("@"):
                with suppress(FileNotFoundError):
                    os.unlink(self.path)

    def end(self) -> None:
        """End all Join calls: the verifier stops."""
        for link in self._links:
            link.end(
                ServiceError.unavailable("DRAINING", "the verifier is shutting down; join again")
            )

    async def Join(self, request_iterator: Any, context: Any) -> None:
        """Serve the connection of one drafter service until it ends."""
        first = await first_message(context)
        if first is grpc.aio.EOF:
            return
        drafters = _checked(first)
        self._review(drafters)
        del first  # a call may last for days
        if len(self._links) + len(self._expected) >= limits.JOINED_SERVICES:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_SERVICES",
                f"{limits.JOINED_SERVICES} drafter services have joined, which is the limit",
                limits.HANDSHAKE_SECONDS,
            )
        token = secrets.token_bytes(_TOKEN_BYTES)
        joined = exchange_pb2.Joined(
            target_fingerprint=self._model.target_fingerprint,
            tokenizer_digest=self._model.tokenizer_digest,
            vocab_size=self._model.vocab_size,
            max_tree_nodes=self._model.max_tree_nodes,
            instance_id=self._model.instance_id,
        )
        connection = asyncio.get_running_loop().create_future()
        joined.socket_path, joined.socket_token = self.path, token
        self._expected[token] = connection
        await context.write(exchange_pb2.JoinResponse(joined=joined))
        second: asyncio.Task[Any] = asyncio.create_task(context.read())
        try:
            async with asyncio.timeout(limits.JOIN_SECONDS):
                await asyncio.wait([second, connection], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            second.cancel()
            raise ServiceError.failed_precondition(
                "NOT_READY",
                f"neither the socket nor this stream was used within {limits.JOIN_SECONDS:g} s; "
                "open the socket, or send use_stream",
            ) from None
        finally:
            self._expected.pop(token, None)
        framed = connection.result() if connection.done() else None
        if framed is None:
            answer = second.result()
            if answer is grpc.aio.EOF:
                return
            if not answer.use_stream:
                raise ServiceError.invalid_argument(
                    "NOT_READY", "the second message must set use_stream, or the socket be opened"
                )
            second = asyncio.create_task(context.read())
        await self._serve(drafters, framed, second, context)

    async def _serve(
        self,
        drafters: exchange_pb2.DrafterList,
        framed: FramedSocket | None,
        reading: asyncio.Task[Any],
        context: Any,
    ) -> None:
        """Use a connection until it ends; ``reading`` reads its next message."""
        loop = asyncio.get_running_loop()
        outgoing: asyncio.Queue[exchange_pb2.JoinResponse] = asyncio.Queue()
        failed: asyncio.Future[None] = loop.create_future()

        def put(message: exchange_pb2.JoinResponse) -> None:
            if outgoing.qsize() < limits.UNSENT_MESSAGES:
                outgoing.put_nowait(message)
            else:
                why = f"{limits.UNSENT_MESSAGES} messages wait for this service; read the stream"
                _set_error(failed, ServiceError.resource_exhausted("NOT_READ", why))

        def write(message: exchange_pb2.JoinResponse) -> None:
            loop.call_soon_threadsafe(put, message)

        def end(error: ServiceError) -> None:
            loop.call_soon_threadsafe(partial(_set_error, failed, error))

        self._check_room(drafters)
        known = self._needs_token or framed is not None or context.peer().startswith("unix:")
        self._check_names(drafters, known)
        link = Link(drafters, write, end, framed, known=known)
        self._links.append(link)
        self._engine.drafting(lambda drafting: drafting.join(link))
        self._list_came()
        lists = 1
        put(exchange_pb2.JoinResponse(lists=lists))
        writing = asyncio.create_task(_write_all(outgoing, context))
        names = sorted({drafter.name for drafter in drafters.drafters})
        if len(names) > limits.LOGGED_NAMES:
            names[limits.LOGGED_NAMES :] = [f"{len(names) - limits.LOGGED_NAMES} more"]
        extra = {"carrier": link.carrier, "drafters": names}
        _log.info("a drafter service joined", extra=extra)
        try:
            while True:
                await asyncio.wait([reading, writing, failed], return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
                if writing.done():
                    writing.result()
                message = reading.result()
                if message is grpc.aio.EOF:
                    return
                await self._received(link, message)
                if message.HasField("drafters"):
                    lists += 1
                    put(exchange_pb2.JoinResponse(lists=lists))
                    await asyncio.sleep(limits.LIST_SECONDS)  # each is work for all callers
                del message
                reading = asyncio.create_task(context.read())
        finally:
            self._links.remove(link)
            self._engine.drafting(lambda drafting: drafting.leave(link))
            for task in (reading, writing):
                task.cancel()
            failed.cancel()
            _log.info("a drafter service left", extra=extra)

    async def _received(self, link: Link, message: exchange_pb2.JoinRequest) -> None:
        """Pass on a message of the stream; return when the engine has taken it, so that no service
        sends more than one between two steps."""
        if message.HasField("drafters"):
            drafters = _checked(message)
            self._review(drafters)
            self._check_room(drafters, link)
            self._check_names(drafters, link.known)
            link.drafters = drafters
            await self._engine.with_drafting(lambda drafting: drafting.update(link, drafters))
            self._list_came()
        elif link.socket is not None:
            raise ServiceError.invalid_argument(
                "WRONG_CARRIER", "this service has opened the socket: send only drafters here"
            )
        if link.socket is None:
            await self._engine.with_drafting(lambda drafting: drafting.receive(link, message))

    def _check_room(self, drafters: exchange_pb2.DrafterList, updated: Link | None = None) -> None:
        """Check that there is room for a list of drafters, in the place of ``updated``'s if
        it is given. Raises ``ServiceError`` if the lists of all services take too much."""
        others = sum(link.drafters.ByteSize() for link in self._links if link is not updated)
        if others + drafters.ByteSize() > limits.DRAFTER_LISTS_BYTES:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_DRAFTERS",
                f"the drafters of all services take more than {limits.DRAFTER_LISTS_BYTES} bytes; "
                "unload some",
                limits.JOIN_SECONDS,
            )

    def _check_names(self, drafters: exchange_pb2.DrafterList, known: bool) -> None:
        """Check that no service of a known user offers what an unknown one brings; an unknown
        service whose names a known one brings ends. Raises ``ServiceError`` if a name is taken."""
        names = {drafter.name for drafter in drafters.drafters}
        for link in self._links:
            taken = names & {drafter.name for drafter in link.drafters.drafters}
            if not taken or link.known == known:
                continue
            error = ServiceError.failed_precondition(
                "NAME_TAKEN",
                f"a service of a known user offers the drafter {min(taken)!r}; open the socket "
                "as the same user, or run both with a token",
            )
            if not known:
                raise error
            link.end(error)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections. Where no file can be opened the oldest that has shown no token makes
        room, and the task goes on."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                self._end_oldest()
                raise
            if len(self._handshakes) >= limits.HANDSHAKES:
                self._end_oldest()
            task = asyncio.create_task(self._handshake(connection))
            self._handshakes[task] = None
            task.add_done_callback(self._handshake_ended)

    def _end_oldest(self) -> None:
        """End the oldest handshake, if there is one."""
        for task in tuple(self._handshakes)[:1]:
            del self._handshakes[task]
            task.cancel()

    def _handshake_ended(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection of a drafter service failed", exc_info=error)

    async def _handshake(self, connection: socket.socket) -> None:
        """Read the first frame of a new connection: a token, or a read grant."""
        with ExitStack() as closing:
            closing.callback(connection.close)
            connection.setblocking(False)
            if not self._trusts(connection):
                return
            loop, frame = asyncio.get_running_loop(), b""
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(limits.HANDSHAKE_SECONDS):
                    while len(frame) < 4 + _TOKEN_BYTES:
                        part = await loop.sock_recv(connection, 4 + _TOKEN_BYTES - len(frame))
                        if not part:
                            break
                        frame += part
            waiting = self._expected.get(frame[4:])
            if waiting is None or waiting.done():
                with suppress(CacheNotFound, OSError):
                    socket.send_fds(connection, [b"\0"], self._files(frame[4:]))
                return
            # The event loop keeps no reference to the descriptor.
            kept = socket.socket(fileno=connection.detach())
            waiting.set_result(FramedSocket(kept, limits.FRAME_BYTES))

    def _trusts(self, connection: socket.socket) -> bool:
        """Return whether who connects may use the socket: the same user, root, or any user where
        calls need a token, for then what it shows was given to somebody who has it."""
        if self._needs_token:
            return True
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(peer)
        if user in (_ROOT, os.getuid()):
            return True
        if user not in self._refused:  # each time would fill the disk
            self._refused.add(user)
            _log.warning("connections of another user are refused", extra={"user": user})
        return False

    def _files(self, token: bytes) -> list[int]:
        """Return the descriptors that a read grant stands for. Raises ``CacheNotFound`` if there is
        none."""
        if self._store is None:
            raise CacheNotFound("there are no caches to map")
        return self._store.find_granted(token).sequence.kv.files


async def _write_all(outgoing: asyncio.Queue[exchange_pb2.JoinResponse], context: Any) -> None:
    while True:
        await context.write(await outgoing.get())


def _set_error(future: asyncio.Future[None], error: ServiceError) -> None:
    if not future.done():
        future.set_exception(error)


def _remove_dead(path: str) -> None:
    """Remove the socket file of a verifier that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return  # bind() tells what is wrong


def _checked(message: exchange_pb2.JoinRequest) -> exchange_pb2.DrafterList:
    """Return a copy of a message's list of drafters, since a part would keep the whole message,
    with whatever else it has. Raises ``ServiceError`` INVALID_ARGUMENT if it is malformed."""
    if not message.HasField("drafters"):
        raise ServiceError.invalid_argument(
            "NOT_JOINED", "the first message of a Join stream must have drafters"
        )
    # GetModel sends the lists of all services to every client.
    listed: Iterable[drafter_pb2.DrafterInfo] = message.drafters.drafters
    names = [text for drafter in listed for text in (drafter.name, drafter.version, drafter.method)]
    if (
        len(message.drafters.drafters) > limits.DRAFTERS
        or max(map(len, (message.drafters.default_drafter, *names))) > limits.NAME_CHARS
        or message.drafters.ByteSize() > limits.DRAFTER_LIST_BYTES
    ):
        raise ServiceError.invalid_argument(
            "BAD_DRAFTERS",
            f"expected at most {limits.DRAFTERS} drafters in {limits.DRAFTER_LIST_BYTES} bytes, "
            f"with names of at most {limits.NAME_CHARS} characters",
        )
    copied = exchange_pb2.DrafterList()
    copied.CopyFrom(message.drafters)
    return copied


def read_tree(
    message: tree_pb2.TokenTree, model: verifier_pb2.GetModelResponse, text: Text
) -> TokenTree:
    """Read and check a tree that was drafted for a text. Raises ``ServiceError``:
    INVALID_ARGUMENT."""
    sampling = text.sampling
    if len(message.distributions) and not sampling.rejection:
        raise ServiceError.invalid_argument(
            "BAD_TREE",
            "distributions belong to the mode REJECTION at temperatures above 0; send none",
        )
    try:
        tree = TokenTree.from_proto(message, MAX_NODES)
        tree.check(model.vocab_size)
        if sampling.rejection:
            tree.check_samples(sampling.seed, len(text))
    except TreeError as error:
        raise ServiceError.invalid_argument(error.reason, str(error)) from error
    return tree
