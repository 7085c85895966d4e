"""The verifiers that a drafter service joins (DraftExchangeService.Join)."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from paceline.drafter.connection import Connection, ServiceParts
from paceline.service import OptionsError, limits
from paceline.service.exchange import FramedSocket, socket_address
from paceline.tokens import TokenError
from paceline.v1 import drafter_pb2, exchange_pb2, exchange_pb2_grpc

logger = logging.getLogger("paceline.drafter")

JOIN_SECONDS = 10.0  # maximum wait for the answer of a verifier to a Join call
REACH_SECONDS = 2.0  # maximum wait for the first attempts, and for verifiers to list a change
FIRST_DELAY, MAX_DELAY = 0.1, 1.0  # before a verifier is joined again, doubled after each attempt
_SOCKET_SECONDS = 1.0
_ADDRESS = re.compile(r"unix:/.+|[^\s:/]+:\d+|\[[0-9a-fA-F:.]+\]:\d+")


class _Ended(Exception):
    """The connection ended; the message says why."""


class _Verifier:
    """A verifier of the list, which is joined again whenever the connection ends. Event loop."""

    def __init__(self, address: str, parts: ServiceParts) -> None:
        self.address = address
        self.connection: Connection | None = None  # None if it is not joined
        self.error = "not joined yet"
        self.tried = asyncio.Event()  # set once the first attempt has ended, or has joined it
        self._announced = 0
        self._listed = asyncio.Event()  # cleared while it has to answer a list of drafters
        self._parts = parts
        self._delay = FIRST_DELAY
        self._outgoing: asyncio.Queue[exchange_pb2.JoinRequest] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"join {address}")

    def link(self) -> drafter_pb2.VerifierLink:
        """Return the verifier as listed. Any thread."""
        connection = self.connection
        if connection is None:
            return drafter_pb2.VerifierLink(address=self.address, error=self.error)
        return drafter_pb2.VerifierLink(
            address=self.address, carrier=connection.carrier, sequences=len(connection.sequences)
        )

    def announce(self) -> None:
        """Send the list of drafters, after a change."""
        self._announced += 1
        self._listed.clear()
        self._outgoing.put_nowait(self._drafters())

    async def listed(self) -> None:
        """Return when the verifier lists the drafters as they are now, or is not joined."""
        if self.connection is not None:
            await self._listed.wait()

    async def close(self) -> None:
        """End the connection and join no more."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def _drafters(self) -> exchange_pb2.JoinRequest:
        """Return the list of drafters; an empty one while the service drains."""
        drafters = exchange_pb2.DrafterList()
        if not self._parts.draining:
            drafters.default_drafter = self._parts.registry.default_name
            for version in self._parts.registry.versions():
                info = version.info()
                info.ClearField("folder")
                info.ClearField("options")  # some are folders too
                drafters.drafters.append(info)
        return exchange_pb2.JoinRequest(drafters=drafters)

    async def _run(self) -> None:
        while True:
            try:
                await self._join()
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except (_Ended, TokenError) as error:
                why = str(error)
            except TimeoutError:
                why = f"it did not answer within {JOIN_SECONDS:g} s"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                why = "the connection was closed"  # which cancels the call, not this task
            except Exception as error:  # the service goes on
                logger.exception("the connection to a verifier failed")
                why = f"{type(error).__name__}: {error}"
            finally:
                self._parts.kv.drop(self.address)
            logger.log(
                logging.DEBUG if why == self.error else logging.INFO,
                "not connected to a verifier; joining again",
                extra={"verifier": self.address, "reason": why},
            )
            self.error = why
            self.tried.set()
            await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))
            self._delay = min(2 * self._delay, MAX_DELAY)

    async def _join(self) -> None:
        """Join, and serve the connection. It returns by an exception only.

        Raises:
            _Ended: The connection ended, or the peer is no verifier.
            AioRpcError: The call failed.
            TimeoutError: The verifier does not answer.
        """
        self._outgoing, self._announced = asyncio.Queue(), 1
        stub: Any = exchange_pb2_grpc.DraftExchangeServiceStub(self._parts.kv.channel(self.address))
        call = stub.Join(metadata=self._parts.kv.metadata(self.address))
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await _write(call, self._drafters())
                first = await _read(call)
                if not first.HasField("joined") or not first.joined.vocab_size:
                    raise _Ended("its first message does not introduce it as a verifier")
                opened = await _open_socket(first.joined)
                try:
                    if opened is not None:
                        self._parts.kv.sockets[self.address] = first.joined.socket_path
                    else:
                        await _write(call, exchange_pb2.JoinRequest(use_stream=True))
                    self._answered(await _read(call))  # from now on it lists this service
                except BaseException:
                    if opened is not None:
                        opened.close()
                    raise
            await self._serve(call, first.joined, opened)
        finally:
            self._listed.set()
            call.cancel()

    def _answered(self, message: exchange_pb2.JoinResponse) -> None:
        """The verifier has taken lists of drafters."""
        if message.lists >= self._announced:
            self._listed.set()

    async def _serve(
        self, call: Any, joined: exchange_pb2.Joined, opened: FramedSocket | None
    ) -> None:
        worker, outgoing = self._parts.worker, self._outgoing
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(why: str) -> None:
            if not failed.done():
                failed.set_exception(_Ended(why))

        def write(message: exchange_pb2.JoinRequest) -> None:
            if outgoing.qsize() >= limits.UNSENT_MESSAGES:
                fail(f"it does not read: {limits.UNSENT_MESSAGES} messages wait for it")
            else:
                outgoing.put_nowait(message)

        async def send() -> None:
            while True:
                await _write(call, await outgoing.get())

        async def receive() -> None:
            while True:
                message = await _read(call)
                if message.lists:
                    self._answered(message)
                    continue
                if opened is not None:
                    raise _Ended("it sent a message over the stream, expected the socket")
                worker.post(partial(connection.receive, message, time.monotonic()))

        apart = on_other_cores(opened)
        connection = Connection(self._parts, self.address, joined, write, fail, opened, apart)
        tasks = [asyncio.create_task(send()), asyncio.create_task(receive())]
        try:
            worker.post(connection.start)
            self.connection, self.error, self._delay = connection, "", FIRST_DELAY
            self.tried.set()
            logger.info(
                "joined a verifier", extra={"verifier": self.address, "carrier": connection.carrier}
            )
            done, _ = await asyncio.wait([*tasks, failed], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                await ended
        finally:
            self.connection = None
            failed.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, failed, return_exceptions=True)
            await connection.close()


class Exchange:
    """All verifiers of a drafter service. Use it on one event loop, :meth:`links` on any thread."""

    def __init__(self, verifiers: Sequence[str], parts: ServiceParts) -> None:
        """Keep the addresses, ``unix:/path`` or ``host:port``; :meth:`start` joins them. Raises
        ``OptionsError`` if one is malformed, or a token would travel to it unencrypted."""
        for address in verifiers:
            if not _ADDRESS.fullmatch(address):
                raise OptionsError(
                    f"--verifier {address!r} is not an address, expected host:port or unix:/path"
                )
            parts.kv.check(address)
        self._addresses = list(dict.fromkeys(verifiers))
        self._parts = parts
        self._verifiers: list[_Verifier] = []

    def links(self) -> list[drafter_pb2.VerifierLink]:
        return [verifier.link() for verifier in tuple(self._verifiers)]

    async def start(self) -> None:
        """Join the verifiers in the background, and tell them of changes of the registry.

        Return when each was tried once, so that one which serves lists this service; one that does
        not answer in time is not waited for.
        """
        self._verifiers += [_Verifier(address, self._parts) for address in self._addresses]
        self._parts.registry.on_change = self._announce
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_SECONDS):
                await asyncio.gather(*(verifier.tried.wait() for verifier in self._verifiers))

    async def listed(self) -> None:
        """Return when the joined verifiers list the drafters as they are now.

        One that does not answer in time is not waited for.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_SECONDS):
                await asyncio.gather(*(verifier.listed() for verifier in self._verifiers))

    async def drain(self) -> None:
        """Open no more sequences, and return when the verifiers have closed all there are."""
        self._parts.draining = True
        self._announce()
        while self._parts.sequences:
            self._parts.closed.clear()
            await self._parts.closed.wait()

    async def close(self) -> None:
        """End all connections. Every sequence has left its version when it returns."""
        self._parts.draining = True
        await asyncio.gather(*(verifier.close() for verifier in self._verifiers))
        self._verifiers.clear()

    def _announce(self) -> None:
        for verifier in self._verifiers:
            verifier.announce()


async def _read(call: Any) -> exchange_pb2.JoinResponse:
    message: exchange_pb2.JoinResponse = await call.read()
    if message is grpc.aio.EOF:
        code = await call.code()
        raise _Ended(
            "it ended the connection"
            if code is grpc.StatusCode.OK
            else f"{code.name}: {await call.details()}"
        )
    return message


async def _write(call: Any, message: exchange_pb2.JoinRequest) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        # The call has ended; its status says why.
        code, details = await call.code(), await call.details()
        raise _Ended(f"{code.name}: {details}") from None


async def _open_socket(joined: exchange_pb2.Joined) -> FramedSocket | None:
    """Open the verifier's Unix socket and show its token; None if it cannot be opened here."""
    path = joined.socket_path
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_SOCKET_SECONDS):
            await asyncio.get_running_loop().sock_connect(connection, socket_address(path))
    except (OSError, TimeoutError, ValueError) as error:
        connection.close()
        logger.debug("using the gRPC stream: cannot open %s: %s", path, error)
        return None
    framed = FramedSocket(connection, limits.VERIFIER_FRAME_BYTES)
    framed.send(joined.socket_token)
    return framed


def on_other_cores(opened: FramedSocket | None) -> bool:
    """Return whether a verifier shares no core with this process: by the cores that both may use,
    or because there is no socket, as from another machine."""
    if opened is None:
        return True
    pid = opened.peer_pid()
    if not pid:  # no process that is visible here; 0 would be this one
        return False
    try:
        return os.sched_getaffinity(pid).isdisjoint(os.sched_getaffinity(0))
    except OSError:  # it has ended, or another user's limits hide it
        return False
