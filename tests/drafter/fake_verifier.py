"""The verifier's side of a draft exchange, on the event loop of a test."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from paceline.v1 import exchange_pb2, exchange_pb2_grpc

VOCAB = 1000
CARRIERS = ("socket", "stream")


class Refused(Exception):
    """The drafter service refused a sequence, or gave it up."""

    def __init__(self, answer: exchange_pb2.SequenceRefused) -> None:
        super().__init__(f"{answer.reason}: {answer.message}")
        self.reason = answer.reason


class Text:
    """One sequence."""

    opened: exchange_pb2.SequenceOpened

    def __init__(self, peer: Peer, number: int, length: int) -> None:
        self.peer = peer
        self.number = number
        self.length = length
        self.rounds = 0
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        """The next answer for it, or the error that ended it."""
        async with asyncio.timeout(60):
            answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, exchange_pb2.SequenceRefused):
            raise Refused(answer)
        return answer

    def request(self, tokens: Sequence[int] = (), **fields: Any) -> exchange_pb2.DraftRound:
        """The next round."""
        self.length += len(tokens)
        self.rounds += 1
        fields = {
            "sequence": self.number,
            "round": self.rounds,
            "node_budget": 16,
            "max_depth": 64,
            "total_length": self.length,
            "new_tokens": tokens,
            **fields,
        }
        return exchange_pb2.DraftRound(**fields)

    async def round(self, tokens: Sequence[int] = (), **fields: Any) -> exchange_pb2.DraftedTree:
        """One round; its tree."""
        request = self.request(tokens, **fields)
        await self.peer.send(exchange_pb2.JoinResponse(rounds=[request]))
        tree = await self.read()
        assert isinstance(tree, exchange_pb2.DraftedTree)
        assert tree.round == request.round
        return tree

    async def end(self) -> None:
        """Close it, and wait until it is closed."""
        await self.peer.send(exchange_pb2.JoinResponse(closed=[self.number]))
        await self.peer.settled()


class Peer:
    """A drafter service that has joined."""

    def __init__(self, drafters: exchange_pb2.DrafterList, context: Any, carrier: str) -> None:
        self.lists = [drafters]
        self.carrier = carrier
        self.messages: list[exchange_pb2.JoinRequest] = []
        """With trees, or answers to sequences."""
        self.texts: dict[int, Text] = {}
        self.ended = asyncio.Event()
        self.leave = asyncio.Event()
        """Set it to end the connection."""
        self.takes_lists = asyncio.Event()
        """Clear it to leave changed lists of drafters unanswered."""
        self.takes_lists.set()
        self.closes = True
        """Close all sequences when the service leaves."""
        self.socket: asyncio.StreamWriter | None = None
        self._context = context
        self._writing = asyncio.Lock()

    async def send(self, message: exchange_pb2.JoinResponse) -> None:
        """Send a message over the carrier."""
        if self.socket is None:
            with suppress(Exception):  # gRPC's own, if the connection has ended
                await self.write(message)
        else:
            await self.send_frame(message.SerializeToString())

    async def write(self, message: exchange_pb2.JoinResponse) -> None:
        """Send a message over the stream, which takes one at a time."""
        async with self._writing:
            await self._context.write(message)

    async def send_frame(self, frame: bytes, length: int | None = None) -> None:
        """Send bytes over the socket, as a frame that may claim another length."""
        assert self.socket is not None
        self.socket.write(struct.pack("<I", len(frame) if length is None else length) + frame)
        with suppress(ConnectionError):
            await self.socket.drain()

    def text(self, tokens: Sequence[int], **fields: Any) -> tuple[Text, exchange_pb2.OpenSequence]:
        """A new sequence, and what opens it."""
        text = Text(self, len(self.texts) + 1, len(tokens))
        self.texts[text.number] = text
        fields = {"prompt_length": len(tokens), **fields}
        return text, exchange_pb2.OpenSequence(sequence=text.number, tokens=tokens, **fields)

    async def open(self, tokens: Sequence[int], **fields: Any) -> Text:
        """Open a sequence and wait until it is."""
        text, message = self.text(tokens, **fields)
        await self.send(exchange_pb2.JoinResponse(open=[message]))
        text.opened = await text.read()
        assert isinstance(text.opened, exchange_pb2.SequenceOpened)
        return text

    async def settled(self) -> None:
        """Wait until all that was sent has taken effect: what is sent now is refused."""
        nothing, message = self.text([])
        await self.send(exchange_pb2.JoinResponse(open=[message]))
        with suppress(Refused):
            await nothing.read()

    def receive(self, message: exchange_pb2.JoinRequest) -> None:
        """Take a message of the drafter service."""
        if message.HasField("drafters"):
            self.lists.append(message.drafters)
            if not message.drafters.drafters and self.closes:
                self._closing = asyncio.create_task(
                    self.send(exchange_pb2.JoinResponse(closed=list(self.texts)))
                )
        answers = [*message.opened, *message.trees, *message.refused]
        if answers:
            self.messages.append(message)
        for answer in answers:
            self.texts[answer.sequence].answers.put_nowait(answer)

    def lost(self) -> None:
        """The connection ended."""
        self.ended.set()
        for text in self.texts.values():
            text.answers.put_nowait(ConnectionError("the connection ended"))


Share = Callable[[bytes], Awaitable[int | None]]
"""Returns a descriptor for a read grant."""


async def share_nothing(read_grant: bytes) -> int | None:
    return None


class FakeVerifier(exchange_pb2_grpc.DraftExchangeServiceServicer):
    """Serves Join.

    Attributes:
        joined: What drafter services are told of the target.
        peers: Connections so far.
        metadata: Of each Join call.
    """

    def __init__(self, address: str, socket_path: Path | None, share: Share) -> None:
        self.address = address
        self.joined = exchange_pb2.Joined(vocab_size=VOCAB, max_tree_nodes=255, instance_id="fake")
        self.peers: list[Peer] = []
        self.metadata: list[dict[str, Any]] = []
        self.refuse = False
        """Refuse Join calls."""
        self._socket_path = socket_path
        self._tokens: dict[bytes, asyncio.Future[tuple[Any, Any]]] = {}
        self._share = share
        self._sharing: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Condition()

    async def peer(self, count: int = 1) -> Peer:
        """The connection with a number, counted from 1, once it is made."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: len(self.peers) >= count)
        return self.peers[count - 1]

    async def Join(self, request_iterator: Any, context: Any) -> None:
        """One connection."""
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.refuse:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today")
        first = await context.read()
        joined = exchange_pb2.Joined()
        joined.CopyFrom(self.joined)
        token = secrets.token_bytes(16)
        connection = self._tokens[token] = asyncio.get_running_loop().create_future()
        if self._socket_path is not None:
            joined.socket_path, joined.socket_token = str(self._socket_path), token
        await context.write(exchange_pb2.JoinResponse(joined=joined))
        if self._socket_path is None or not self._socket_path.exists():
            assert (await context.read()).use_stream
            peer = Peer(first.drafters, context, "stream")
        else:
            reader, writer = await connection
            peer = Peer(first.drafters, context, "socket")
            peer.socket = writer
        await context.write(exchange_pb2.JoinResponse(lists=1))
        tasks = [asyncio.create_task(self._read_stream(peer, context))]
        if peer.socket is not None:
            tasks.append(asyncio.create_task(self._read_socket(peer, reader)))
        tasks.append(asyncio.create_task(peer.leave.wait()))  # type: ignore[arg-type]
        async with self._changed:
            self.peers.append(peer)
            self._changed.notify_all()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if peer.socket is not None:
                peer.socket.close()
            peer.lost()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The Unix socket was opened."""
        with suppress(asyncio.IncompleteReadError):
            frame = await _read_frame(reader)
            if frame in self._tokens:
                self._tokens[frame].set_result((reader, writer))
                return
            sharing = asyncio.create_task(self._share(frame))
            self._sharing.add(sharing)
            with suppress(asyncio.CancelledError):
                file = await sharing
                if file is not None:
                    own = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
                    with own:
                        socket.send_fds(own, [b"\0"], [file])
        writer.close()

    def close(self) -> None:
        """End connections that wait for memory."""
        for task in self._sharing:
            task.cancel()

    async def _read_stream(self, peer: Peer, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            assert peer.socket is None or message.HasField("drafters")
            peer.receive(message)
            if message.HasField("drafters"):
                await peer.takes_lists.wait()
                await peer.write(exchange_pb2.JoinResponse(lists=len(peer.lists)))

    async def _read_socket(self, peer: Peer, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                peer.receive(exchange_pb2.JoinRequest.FromString(await _read_frame(reader)))


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    return await reader.readexactly(length)


@asynccontextmanager
async def fake_verifier(
    folder: Path,
    carrier: str = "socket",
    share: Share = share_nothing,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[FakeVerifier]:
    """Serve it on a unix socket; with credentials, on a port of the loopback.

    Args:
        folder: For sockets.
        carrier: socket or stream.
        share: Gives the memory of caches.
        credentials: TLS.
    """
    path = folder / "exchange" if carrier == "socket" else None
    verifier = FakeVerifier(f"unix:{folder}/verifier", path, share)
    listener = None
    if path is not None:
        listener = await asyncio.start_unix_server(verifier.connected, path)
    server = grpc.aio.server()
    exchange_pb2_grpc.add_DraftExchangeServiceServicer_to_server(verifier, server)
    if credentials is None:
        server.add_insecure_port(verifier.address)
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
        verifier.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield verifier
    finally:
        verifier.close()
        for peer in verifier.peers:
            peer.leave.set()
        await server.stop(0.1)
        if listener is not None:
            listener.close()
