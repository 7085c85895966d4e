"""Both sides of a draft exchange, on the event loop of a test."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from calls import refusal, until

from paceline.tree import TokenTree
from paceline.v1 import drafter_pb2, exchange_pb2, exchange_pb2_grpc, tree_pb2

if TYPE_CHECKING:
    from paceline.verifier import VerifierService

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
        self.length += len(tokens)
        self.rounds += 1
        fields = {"node_budget": 16, "max_depth": 64, "total_length": self.length} | fields
        return exchange_pb2.DraftRound(
            sequence=self.number, round=self.rounds, new_tokens=tokens, **fields
        )

    async def round(self, tokens: Sequence[int] = (), **fields: Any) -> exchange_pb2.DraftedTree:
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
        self.messages: list[exchange_pb2.JoinRequest] = []  # with trees, or answers to sequences
        self.texts: dict[int, Text] = {}
        self.ended = asyncio.Event()
        self.leave = asyncio.Event()  # set it to end the connection
        self.takes_lists = asyncio.Event()  # clear it to leave changed lists of drafters unanswered
        self.takes_lists.set()
        self.closes = True  # close all sequences when the service leaves
        self.socket: asyncio.StreamWriter | None = None
        self.context = context
        self.writing = asyncio.Lock()

    async def send(self, message: exchange_pb2.JoinResponse) -> None:
        if self.socket is None:
            with suppress(Exception):  # gRPC's own, if the connection has ended
                await self.write(message)
        else:
            await self.send_frame(message.SerializeToString())

    async def write(self, message: exchange_pb2.JoinResponse) -> None:
        """Send a message over the stream, which takes one at a time."""
        async with self.writing:
            await self.context.write(message)

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
                self.closing = asyncio.create_task(
                    self.send(exchange_pb2.JoinResponse(closed=list(self.texts)))
                )
        answers = [*message.opened, *message.trees, *message.refused]
        if answers:
            self.messages.append(message)
        for answer in answers:
            self.texts[answer.sequence].answers.put_nowait(answer)

    def lost(self) -> None:
        self.ended.set()
        for text in self.texts.values():
            text.answers.put_nowait(ConnectionError("the connection ended"))


Share = Callable[[bytes], Awaitable[int | None]]  # returns a descriptor for a read grant


async def share_nothing(read_grant: bytes) -> int | None:
    return None


class ExchangeServicer(exchange_pb2_grpc.DraftExchangeServiceServicer):
    """Serves Join."""

    def __init__(self, address: str, socket_path: Path | None, share: Share) -> None:
        self.address = address
        # What drafter services are told of the target.
        self.joined = exchange_pb2.Joined(vocab_size=VOCAB, max_tree_nodes=255, instance_id="fake")
        self.peers: list[Peer] = []  # connections so far
        self.metadata: list[dict[str, Any]] = []  # of each Join call
        self.refuse = False  # refuse Join calls
        self.socket_path = socket_path
        self.tokens: dict[bytes, asyncio.Future[tuple[Any, Any]]] = {}
        self.share = share
        self.sharing: set[asyncio.Task[Any]] = set()
        self.changed = asyncio.Condition()

    async def peer(self, count: int = 1) -> Peer:
        """The connection with a number, counted from 1, once it is made."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(self.peers) >= count)
        return self.peers[count - 1]

    async def Join(self, request_iterator: Any, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.refuse:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today")
        first = await context.read()
        joined = exchange_pb2.Joined()
        joined.CopyFrom(self.joined)
        token = secrets.token_bytes(16)
        connection = self.tokens[token] = asyncio.get_running_loop().create_future()
        if self.socket_path is not None:
            joined.socket_path, joined.socket_token = str(self.socket_path), token
        await context.write(exchange_pb2.JoinResponse(joined=joined))
        if self.socket_path is None or not self.socket_path.exists():
            assert (await context.read()).use_stream
            peer = Peer(first.drafters, context, "stream")
        else:
            reader, writer = await connection
            peer = Peer(first.drafters, context, "socket")
            peer.socket = writer
        await context.write(exchange_pb2.JoinResponse(lists=1))
        tasks = [asyncio.create_task(self.read_stream(peer, context))]
        if peer.socket is not None:
            tasks.append(asyncio.create_task(self.read_socket(peer, reader)))
        tasks.append(asyncio.create_task(peer.leave.wait()))  # type: ignore[arg-type]
        async with self.changed:
            self.peers.append(peer)
            self.changed.notify_all()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if peer.socket is not None:
                peer.socket.close()
            peer.lost()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            frame = await _read_frame(reader)
            if frame in self.tokens:
                self.tokens[frame].set_result((reader, writer))
                return
            sharing = asyncio.create_task(self.share(frame))
            self.sharing.add(sharing)
            with suppress(asyncio.CancelledError):
                file = await sharing
                if file is not None:
                    descriptor = os.dup(writer.get_extra_info("socket").fileno())
                    with socket.socket(fileno=descriptor) as sending:
                        socket.send_fds(sending, [b"\0"], [file])
        writer.close()

    def close(self) -> None:
        for task in self.sharing:
            task.cancel()

    async def read_stream(self, peer: Peer, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            assert peer.socket is None or message.HasField("drafters")
            peer.receive(message)
            if message.HasField("drafters"):
                await peer.takes_lists.wait()
                await peer.write(exchange_pb2.JoinResponse(lists=len(peer.lists)))

    async def read_socket(self, peer: Peer, reader: asyncio.StreamReader) -> None:
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
) -> AsyncIterator[ExchangeServicer]:
    """Serve it on a unix socket; with credentials, on a port of the loopback."""
    path = folder / "exchange" if carrier == "socket" else None
    verifier = ExchangeServicer(f"unix:{folder}/verifier", path, share)
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


# Gives a tree for a text; a message is sent as it is, and None refuses the sequence.
Drafter = Callable[[list[int], random.Random], TokenTree | tree_pb2.TokenTree | None]


class DrafterService:
    """A drafter service with a function for each version of its one drafter."""

    numbers = count()

    def __init__(
        self,
        verifier: VerifierService,
        channel: grpc.aio.Channel,
        *,
        socket: bool = True,
        name: str = "test",
    ) -> None:
        """Make a service that joins with its first function."""
        self.verifier = verifier
        self.stub = exchange_pb2_grpc.DraftExchangeServiceStub(channel)
        self.use_socket = socket
        self.name = name
        self.mark = f"test {next(self.numbers)}"
        self.functions: dict[str, tuple[Drafter, int]] = {}
        self.join_lock = asyncio.Lock()
        self.writing = asyncio.Lock()
        self.call: Any = None
        self.serving: asyncio.Task[None] | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.infos = [self.info(str(version)) for version in range(64)]  # as announced
        self.joined: exchange_pb2.Joined | None = None  # the answer, once it has joined
        self.opened: list[exchange_pb2.OpenSequence] = []  # of all connections, in order
        self.sequences: dict[int, tuple[Drafter, list[int], random.Random]] = {}  # those open
        self.messages = 0  # number of messages that came
        self.refuses = False  # to open sequences
        self.reason = "REFUSED"  # of its refusals
        self.paused: list[exchange_pb2.DraftRound] | None = None  # kept, unless all are answered
        self.silent = False  # about sequences that it is asked to open

    async def __aenter__(self) -> DrafterService:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    def info(self, version: str, name: str | None = None) -> drafter_pb2.DrafterInfo:
        return drafter_pb2.DrafterInfo(
            name=name or self.name, version=version, method=self.mark, traffic_share=1.0
        )

    async def add(self, drafter: Drafter, seed: int = 0) -> str:
        """Add a function; returns the drafter's name, with its version."""
        await self.joining()
        version = next(str(n) for n in count() if str(n) not in self.functions)
        self.functions[version] = (drafter, seed)
        return f"{self.name}@{version}"

    def remove(self, name: str) -> None:
        """Remove a function that no sequence will be opened with."""
        del self.functions[name.partition("@")[2]]

    async def joining(self) -> None:
        """Join the verifier, unless it has joined."""
        async with self.join_lock:
            if self.joined is None:
                await self.join()

    async def join(self) -> None:
        self.call = self.stub.Join()
        await self.call.write(exchange_pb2.JoinRequest(drafters=self.listed()))
        self.joined = (await self.call.read()).joined
        if self.use_socket:
            path = self.joined.socket_path.replace("@", "\0", 1)
            reader, self.writer = await asyncio.open_unix_connection(path)
            self.write(self.joined.socket_token)
            await self.call.read()
            self.serving = asyncio.create_task(self.serve_socket(reader))
        else:
            await self.call.write(exchange_pb2.JoinRequest(use_stream=True))
            await self.call.read()
            self.serving = asyncio.create_task(self.serve_stream())
        await until(lambda: self.infos in self.known())

    async def update(self, infos: list[drafter_pb2.DrafterInfo]) -> None:
        self.infos = infos
        async with self.writing:
            await self.call.write(exchange_pb2.JoinRequest(drafters=self.listed()))
        await until(lambda: self.infos in self.known())

    async def send(self, **fields: Any) -> None:
        message = exchange_pb2.JoinRequest(**fields)
        if self.writer is None:
            async with self.writing:  # gRPC takes one message at a time
                await self.call.write(message)
        else:
            self.write(message.SerializeToString())

    def write(self, frame: bytes) -> None:
        assert self.writer is not None
        self.writer.write(len(frame).to_bytes(4, "little") + frame)

    async def leave(self) -> None:
        if self.serving is None:
            return
        self.serving.cancel()
        if self.writer is not None:
            self.writer.close()
        self.call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.serving
        await until(
            lambda: not any(each.method == self.mark for infos in self.known() for each in infos)
        )
        self.joined, self.serving, self.writer = None, None, None
        self.sequences.clear()

    async def error(self) -> tuple[grpc.StatusCode, str]:
        """Status and reason that the verifier ends the connection with."""
        assert self.serving is not None
        return await refusal(self.serving if self.writer is None else self.call)

    async def answer(self) -> None:
        """Answer the rounds that were kept, and later ones at once."""
        kept, self.paused = self.paused, None
        reply = exchange_pb2.JoinRequest()
        for round_ in kept or ():
            self.draft(round_, reply)
        if reply.trees or reply.refused:  # a message that answers nothing is a violation
            await self.send(trees=reply.trees, refused=reply.refused)

    def listed(self) -> exchange_pb2.DrafterList:
        return exchange_pb2.DrafterList(drafters=self.infos, default_drafter=self.name)

    def known(self) -> list[list[drafter_pb2.DrafterInfo]]:
        return [list(each.drafters) for each in self.verifier.joined()]

    async def serve_stream(self) -> None:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            await self.received(message)

    async def serve_socket(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self.received(exchange_pb2.JoinResponse.FromString(await _read_frame(reader)))

    async def received(self, message: exchange_pb2.JoinResponse) -> None:
        self.messages += 1
        for number in message.closed:
            self.sequences.pop(number, None)
        reply = exchange_pb2.JoinRequest()
        for opened in message.open:
            self.opened.append(opened)
            if self.silent:
                continue
            number, version = opened.sequence, opened.version or "0"
            if self.refuses or version not in self.functions:
                why = "it may not be opened"
                reply.refused.add(sequence=number, reason=self.reason, message=why)
                continue
            function, seed = self.functions[version]
            self.sequences[number] = (function, list(opened.tokens), random.Random(seed))
            reply.opened.add(sequence=number, drafter=opened.drafter, version=version)
        for round_ in message.rounds:
            if self.paused is not None:
                self.paused.append(round_)
            else:
                self.draft(round_, reply)
        if reply.opened or reply.trees or reply.refused:
            await self.send(opened=reply.opened, trees=reply.trees, refused=reply.refused)

    def draft(self, round_: exchange_pb2.DraftRound, reply: exchange_pb2.JoinRequest) -> None:
        """Add the tree of a round to a message; nothing if its sequence is closed."""
        if round_.sequence not in self.sequences:
            return
        function, text, rng = self.sequences[round_.sequence]
        text += round_.new_tokens
        assert len(text) == round_.total_length
        drafted = function(text, rng)
        if drafted is None:
            del self.sequences[round_.sequence]
            reply.refused.add(sequence=round_.sequence, reason=self.reason, message="it failed")
            return
        if isinstance(drafted, TokenTree):
            drafted = drafted.first(round_.node_budget).to_proto()
        reply.trees.add(sequence=round_.sequence, round=round_.round, tree=drafted, draft_us=1)
