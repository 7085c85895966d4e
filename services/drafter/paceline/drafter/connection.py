"""One connection to a verifier: its sequences, the rounds that come and the trees that go."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from paceline.drafter.kv import KvGone
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.methods.base import Budget, GenerationInfo, Update
from paceline.drafter.registry import Registry, Version
from paceline.drafter.session import (
    Drafted,
    Session,
    check_fit,
    check_open,
    check_round,
    open_session,
    read_sampling,
)
from paceline.drafter.worker import DraftWorker, Job
from paceline.service import ServiceError, limits
from paceline.service.exchange import FramedSocket, PeerGone
from paceline.telemetry.names import Attribute, Span
from paceline.telemetry.tracing import Attributes, add_server_span
from paceline.tree import EMPTY
from paceline.v1 import exchange_pb2

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

    from paceline.drafter.metrics import DrafterMetrics

logger = logging.getLogger("paceline.drafter")

# Maximum wait of a round for hidden states that are in flight, deadline permitting.
_STATES_SECONDS = 0.25


@dataclass
class ServiceParts:
    """What connections share with the rest of the service."""

    registry: Registry  # Chooses versions. Event loop.
    worker: DraftWorker  # the drafting thread
    kv: KvExchange  # Opens the target's KV and hidden states. Event loop.
    metrics: DrafterMetrics | None  # Counts rounds and sessions; None: no metrics. Drafting thread.
    tracer: Tracer | None  # Makes spans; None: no spans. Any thread.
    max_context: int  # maximum length of a text, in tokens
    max_sequences: int  # maximum number of open sequences of the whole service
    draining: bool = False  # No sequence is opened any more. Event loop.
    sequences: int = 0  # Sequences of the whole service, those being opened included. Event loop.
    # Set whenever a sequence was closed. Event loop.
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Attachment:
    """A sequence's place at a version.

    The event loop makes it and attaches it to the registry. The drafting thread takes it and gives
    it back.
    """

    version: Version
    session: Session
    evict: Callable[[], None]  # ends the sequence; the registry calls it for a forced unload


class _Sequence:
    """A sequence of the verifier. Only the drafting thread changes it."""

    def __init__(self, message: exchange_pb2.OpenSequence) -> None:
        """Keep what was sent; its tokens become the text."""
        self.number = message.sequence
        self.text = array("I", message.tokens)
        message.ClearField("tokens")
        self.message = message
        self.attachment: _Attachment | None = None  # None if it is being opened
        self.said_opened = False  # whether the verifier was told that it is open
        self.round: exchange_pb2.DraftRound | None = None  # the round that was not answered
        self.arrived = 0.0  # when the round came (time.monotonic)
        self.evicted = False  # whether its version was unloaded by force


class Connection:
    """One connection to a verifier, from its first message until its end.

    Thread safety: the drafting thread owns the sequences, the socket and the message that is
    collected for the verifier. The event loop makes a connection and posts to the thread. What
    needs the event loop (choosing a version, opening KV, waiting for hidden states) runs there in
    tasks, which post their results. Any thread may read the number of ``sequences``.
    """

    def __init__(
        self,
        parts: ServiceParts,
        address: str,
        joined: exchange_pb2.Joined,
        write: Callable[[exchange_pb2.JoinRequest], None],
        fail: Callable[[str], None],
        socket: FramedSocket | None,
        apart: bool,
    ) -> None:
        """Make a connection, on the event loop.

        ``write`` sends a message over the gRPC stream, ``fail`` ends the connection with a reason;
        both are called on the event loop. Without a socket, messages travel over the stream.
        ``apart``: whether the verifier works on other cores.
        """
        self.sequences: dict[int, _Sequence] = {}  # open, or being opened, by number
        self._parts = parts
        self._worker = parts.worker
        self._address = address
        self._target = joined
        self._write = write
        self._fail = fail
        self._socket = socket
        self._apart = apart
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0
        self._ended = False
        self._outgoing = exchange_pb2.JoinRequest()
        self._sent_ns = 0
        self._answered: list[tuple[Version, Drafted, str, int]] = []

    @property
    def carrier(self) -> str:
        return "stream" if self._socket is None else "socket"

    async def close(self) -> None:
        """Close all sequences, on the event loop; no other message is sent."""
        await self._worker.run(self._end)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._worker.run(lambda: None)  # it gives back what they opened

    # The drafting thread.

    def start(self) -> None:
        if self._socket is not None:
            self._worker.add_socket(self._socket.fileno(), self._read)

    def receive(self, message: exchange_pb2.JoinResponse, arrived: float) -> None:
        """Take a message of the verifier that came at ``arrived`` (time.monotonic)."""
        if self._ended:
            return
        try:
            closed = set(message.closed)
            for number in closed:
                self._close(number)
            for opened in message.open:
                self._open(opened)
                if opened.sequence in closed:
                    self._close(opened.sequence)
            for round_ in message.rounds:
                self._round(round_, arrived)
        except ServiceError as error:
            self._break(f"{error.reason}: {error.message}")

    def _read(self) -> None:
        assert self._socket is not None, "it is read"
        arrived = time.monotonic()
        try:
            if self._socket.unsent:
                self._socket.flush()
                self._watch(self._socket)
            for frame in self._socket.receive():
                self.receive(exchange_pb2.JoinResponse.FromString(frame), arrived)
        except PeerGone as gone:
            self._break(str(gone))
        except DecodeError:
            self._break("a message on the socket is not a JoinResponse")

    def _flush(self) -> None:
        self._sent_ns = time.time_ns()
        self._worker.flush_later(self._count)
        if self._ended:
            return
        message, self._outgoing = self._outgoing, exchange_pb2.JoinRequest()
        if self._socket is None:
            for part in _parts(message):
                self._call_soon(self._write, part)
            return
        try:
            for part in _parts(message):
                self._socket.send(part.SerializeToString())
            if self._socket.unsent:
                self._watch(self._socket)
        except PeerGone as gone:
            self._break(str(gone))

    def _watch(self, socket: FramedSocket) -> None:
        self._worker.watch_writable(socket.fileno(), writable=socket.unsent)

    def _break(self, why: str) -> None:
        self._end()
        self._call_soon(self._fail, why)

    def _end(self) -> None:
        """Close the socket and all sequences. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._socket is not None:
            self._worker.remove_socket(self._socket.fileno())
            self._socket.close()
        for number in tuple(self.sequences):
            self._close(number)

    def _close(self, number: int) -> None:
        """The verifier, or the end of the connection, closes a sequence; none if it is not open."""
        sequence = self.sequences.pop(number, None)
        if sequence is not None:
            attachment, sequence.attachment = sequence.attachment, None
            if attachment is not None:
                self._detach(attachment)
            self._call_soon(self._closed)

    def _refuse(self, sequence: _Sequence, error: ServiceError) -> None:
        if self.sequences.get(sequence.number) is not sequence:
            return
        logger.debug("refused a sequence: %s: %s", error.reason, error.message)
        self._outgoing.refused.add(
            sequence=sequence.number, reason=error.reason, message=error.message
        )
        self._worker.flush_later(self._flush)
        self._close(sequence.number)

    def _find(self, number: int) -> _Sequence | None:
        """Return an open sequence; None if it was refused or closed. Raises ``ServiceError``: the
        verifier never opened it."""
        if not 0 < number <= self._last:
            raise ServiceError.invalid_argument(
                "UNKNOWN_SEQUENCE",
                f"a message names the sequence {number}, expected 1 to {self._last}: open it first",
            )
        return self.sequences.get(number)

    def _open(self, message: exchange_pb2.OpenSequence) -> None:
        if message.sequence <= self._last:
            raise ServiceError.invalid_argument(
                "UNKNOWN_SEQUENCE",
                f"the sequence {message.sequence} was opened before; number them from 1, each once",
            )
        self._last = message.sequence
        sequence = self.sequences[message.sequence] = _Sequence(message)
        self._call_soon(self._opened, sequence, list(sequence.text))

    def _round(self, message: exchange_pb2.DraftRound, arrived: float) -> None:
        sequence = self._find(message.sequence)
        if sequence is None:
            return
        if sequence.round is not None:
            raise ServiceError.invalid_argument(
                "ROUND_IN_PROGRESS",
                f"round {message.round} of sequence {message.sequence} came before round "
                f"{sequence.round.round} was answered; wait for its tree",
            )
        sequence.round, sequence.arrived = message, arrived
        if sequence.attachment is not None:
            self._prepare(sequence, sequence.attachment)

    def _attach(self, sequence: _Sequence, attachment: _Attachment) -> None:
        """The sequence was opened at a version. The verifier is told once the prompt was read,
        since it asks for a tree then and waits for it; or at once if it waits already."""
        if self.sequences.get(sequence.number) is not sequence:
            self._detach(attachment)
            return
        sequence.attachment = attachment
        if sequence.evicted:
            self._evicted(sequence)
            return
        if sequence.round is not None:
            self._prepare(sequence, attachment)
            return
        opened = partial(self._say_opened, sequence, attachment)
        self._worker.catch_up(attachment.session, opened)

    def _say_opened(self, sequence: _Sequence, attachment: _Attachment) -> None:
        """Tell the verifier, once, that trees of a sequence may be requested."""
        if sequence.said_opened:
            return
        sequence.said_opened = True
        spec, drafter = attachment.version.spec, attachment.version.drafter
        self._outgoing.opened.add(
            sequence=sequence.number,
            drafter=spec.name,
            version=attachment.version.version,
            method=spec.method,
            max_nodes=drafter.max_nodes,
            kv_transport=attachment.session.kv_transport,
        )
        self._worker.flush_later(self._flush)

    def _prepare(self, sequence: _Sequence, attachment: _Attachment) -> None:
        """Draft the round: at once, or when hidden states have come, or at another version."""
        assert sequence.round is not None, "it has a round"
        self._say_opened(sequence, attachment)
        version = attachment.version
        if (version.draining or version.failing) and self._replaceable(sequence, version):
            message = f"version {version.version!r} of drafter {version.spec.name!r} is replaced"
            self._refuse(sequence, ServiceError.unavailable("DRAFTER_REPLACED", message))
        elif attachment.session.lacks_states(sequence.round.committed_length):
            self._call_soon(
                self._start, self._wait_for_states(sequence, sequence.round, attachment)
            )
        else:
            self._draft(sequence)

    def _replaceable(self, sequence: _Sequence, version: Version) -> bool:
        other = self._parts.registry.replacement(version)
        return not sequence.message.version and other is not None

    def _draft(self, sequence: _Sequence) -> None:
        """Queue the round of a sequence, if it is still open."""
        attachment, message = sequence.attachment, sequence.round
        if (
            self.sequences.get(sequence.number) is not sequence
            or attachment is None
            or message is None
        ):
            return
        length = len(sequence.text) + len(message.new_tokens)
        try:
            check_round(
                message,
                length,
                self._target.vocab_size,
                self._parts.max_context,
                attachment.version,
            )
        except ServiceError as error:
            self._refuse(sequence, error)
            return
        sequence.text.extend(message.new_tokens)
        drafter, seconds = attachment.version.drafter, message.timeout_us / 1e6
        budget = Budget(
            nodes=min(message.node_budget, drafter.max_nodes) if message.max_depth else 0,
            depth=min(message.max_depth, drafter.max_depth),
            deadline=sequence.arrived + seconds if seconds else math.inf,
        )
        update = Update(tuple(message.new_tokens), message.committed_length)
        answer = partial(self._drafted, sequence, attachment, budget)
        self._worker.submit(Job(attachment.session, update, budget, sequence.arrived, answer))

    def _drafted(
        self,
        sequence: _Sequence,
        attachment: _Attachment,
        budget: Budget,
        result: Drafted | Exception,
    ) -> None:
        """Answer a round. One that failed gets an empty tree if another version can take over."""
        version, message = attachment.version, sequence.round
        assert message is not None, "it has a round"
        replaceable = self._replaceable(sequence, version)
        try:
            if isinstance(result, Exception):
                raise result
            if replaceable:  # else the verifier checks it
                result.tree.check(self._target.vocab_size)
                if len(result.tree) > budget.nodes:
                    raise ValueError(
                        f"a tree of {len(result.tree)} nodes, expected at most {budget.nodes}"
                    )
            tree = result.tree.to_proto()
            if budget.nodes:
                version.add_round(failed=False)
        except KvGone as error:
            self._refuse(
                sequence,
                ServiceError.unavailable(
                    "KV_GONE", f"{error}; open it again with the read grant of the cache in use"
                ),
            )
            return
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if version.add_round(failed=True):
                self._call_soon(self._parts.registry.take_out, version, what)
            if not replaceable:
                self._refuse(sequence, _draft_failed(version, what))
                return
            result = Drafted(EMPTY, 0.0, 0.0)
            tree = EMPTY.to_proto()
        sequence.round = None
        self._outgoing.trees.add(
            sequence=sequence.number,
            round=message.round,
            tree=tree,
            draft_us=round(result.draft_seconds * 1e6),
            queue_us=round(result.queue_seconds * 1e6),
            kv_bytes=attachment.session.take_received_bytes(),
        )
        arrived = time.time_ns() - round((time.monotonic() - sequence.arrived) * 1e9)
        self._answered.append((version, result, message.traceparent, arrived))
        self._worker.flush_later(self._flush)

    def _count(self) -> None:
        """Count answered rounds and make their spans, after all messages were sent.

        The spans end when their message was sent: the verifier's, their parents, end with it.
        """
        answered, self._answered = self._answered, []
        metrics, tracer = self._parts.metrics, self._parts.tracer
        for version, drafted, traceparent, arrived in answered:
            if metrics is not None:
                metrics.drafted(version, drafted)
            if tracer is not None and traceparent:
                attributes: Attributes = {
                    **version.attributes,
                    Attribute.NUM_DRAFT_TOKENS: len(drafted.tree.tokens),
                    Attribute.QUEUE_DURATION: drafted.queue_seconds,
                    Attribute.COMPUTE_DURATION: drafted.draft_seconds,
                }
                add_server_span(
                    tracer, Span.DRAFTER_ROUND, traceparent, arrived, self._sent_ns, attributes
                )

    def _evicted(self, sequence: _Sequence) -> None:
        sequence.evicted = True
        if sequence.attachment is not None:
            version = sequence.attachment.version
            message = (
                f"version {version.version!r} of drafter {version.spec.name!r} was unloaded; open "
                "it again to get another version"
            )
            self._refuse(sequence, ServiceError.unavailable("DRAFTER_UNLOADED", message))

    def _detach(self, attachment: _Attachment) -> None:
        self._worker.close(attachment.session)
        self._call_soon(self._parts.registry.detach, attachment.version, attachment.evict)

    def _call_soon(self, call: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            logger.debug("the event loop closed before a connection ended")

    # The event loop.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _opened(self, sequence: _Sequence, tokens: list[int]) -> None:
        self._parts.sequences += 1
        self._start(self._opening(sequence, tokens))

    async def _opening(self, sequence: _Sequence, tokens: list[int]) -> None:
        parts, message = self._parts, sequence.message
        try:
            if parts.draining:
                raise ServiceError.unavailable(
                    "DRAINING", "the drafter service is shutting down; use another one"
                )
            if parts.sequences > parts.max_sequences:
                raise ServiceError.resource_exhausted(
                    "TOO_MANY_SEQUENCES",
                    f"this drafter service has {parts.max_sequences} sequences, which is its "
                    "limit; generate without drafts, and open it later",
                )
            check_open(message, tokens, self._target.vocab_size, parts.max_context)
            version = parts.registry.choose(message.drafter, message.version)
            attachment = await self._take(sequence, version, tokens)
        except ServiceError as error:
            self._worker.post(partial(self._refuse, sequence, error))
        else:
            self._worker.post(partial(self._attach, sequence, attachment))

    def _closed(self) -> None:
        self._parts.sequences -= 1
        self._parts.closed.set()

    async def _wait_for_states(
        self, sequence: _Sequence, message: exchange_pb2.DraftRound, attachment: _Attachment
    ) -> None:
        """Draft a round when hidden states that are in flight have come."""
        states = attachment.session.states
        if states is not None and message.node_budget:
            seconds = _STATES_SECONDS
            if message.timeout_us:
                left = sequence.arrived + message.timeout_us / 1e6 - time.monotonic()
                seconds = max(0.0, min(left / 2, seconds))
            await states.wait_for(message.committed_length, seconds)
        self._worker.post(partial(self._draft, sequence))

    async def _take(self, sequence: _Sequence, version: Version, tokens: list[int]) -> _Attachment:
        """Open a session at a version, which was chosen without an await in between. Raises
        ``ServiceError``: the version does not fit, or its session cannot be opened."""
        parts, message = self._parts, sequence.message

        def evict() -> None:
            self._worker.post(partial(self._evicted, sequence))

        parts.registry.attach(version, evict)
        try:
            check_fit(self._target, message.read_grant, tokens, version)
            generation = GenerationInfo(
                tokens=tokens,
                prompt_length=message.prompt_length,
                vocab_size=self._target.vocab_size,
                sampling=read_sampling(message.sampling, self._target.vocab_size),
                owner=message.owner,
                read_grant=message.read_grant,
                verifier_address=self._address,
            )
            session = await open_session(
                version, generation, parts.kv, parts.tracer, message.traceparent
            )
            session.apart = self._apart
        except BaseException as error:
            parts.registry.detach(version, evict)
            if isinstance(error, KvGone):
                raise ServiceError.unavailable("KV_GONE", str(error)) from error
            if isinstance(error, ServiceError) or not isinstance(error, Exception):
                raise
            raise _draft_failed(version, f"{type(error).__name__}: {error}") from error
        return _Attachment(version, session, evict)


def _parts(message: exchange_pb2.JoinRequest) -> list[exchange_pb2.JoinRequest]:
    """Return a message, or several with its trees, none of them longer than a verifier takes."""
    if message.ByteSize() <= limits.FRAME_BYTES:
        return [message]
    parts = [exchange_pb2.JoinRequest(opened=message.opened, refused=message.refused)]
    size = parts[0].ByteSize()
    for tree in message.trees:
        size += tree.ByteSize() + 8
        if size > limits.FRAME_BYTES:
            parts.append(exchange_pb2.JoinRequest())
            size = tree.ByteSize() + 8
        parts[-1].trees.append(tree)
    return parts


def _draft_failed(version: Version, what: str) -> ServiceError:
    return ServiceError.internal(
        "DRAFT_FAILED",
        f"version {version.version!r} of drafter {version.spec.name!r} failed: {what}; use another "
        "drafter or version",
    )
