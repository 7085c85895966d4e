"""Connections to drafter services: what they announced, and the sequences that are open there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.service import ServiceError, limits
from paceline.service.exchange import FramedSocket
from paceline.v1 import drafter_pb2, exchange_pb2
from paceline.verifier.engine.drafted import DraftedText, DrafterVersion


@dataclass(eq=False)
class Link:
    """The connection to one drafter service.

    The event loop makes it and hands it to :meth:`Drafting.join`; the engine thread uses it from
    then on. Any thread may read ``drafters``, which is replaced as a whole, ``carrier`` and the
    number of ``sequences``.
    """

    drafters: exchange_pb2.DrafterList  # what the service announced last
    # Sends a message over the gRPC stream. Called on the engine thread.
    write: Callable[[exchange_pb2.JoinResponse], None]
    # Ends the Join call with an error. Called on the engine thread.
    end: Callable[[ServiceError], None]
    # Its Unix socket; None: its messages travel over the gRPC stream.
    socket: FramedSocket | None = None
    # Open sequences by number.
    sequences: dict[int, SequenceAtDrafter] = field(default_factory=dict)
    last: int = 0  # the newest number that was given out
    # Answers that may still come for sequences that were closed before they were on their way.
    late: int = 0
    # What is sent next.
    message: exchange_pb2.JoinResponse = field(default_factory=exchange_pb2.JoinResponse)
    # Mean latency of trees by version. Unit: seconds.
    latency: dict[DrafterVersion, float] = field(default_factory=dict)
    # Trees and answers that were wrong, late or never came since the last tree that was taken. Of
    # several services that offer a drafter the one with the fewest gets a sequence.
    failures: int = 0
    joined: bool = False  # whether the engine uses it
    # Whether it is of a user who may join: by a token, or by the user of the socket.
    known: bool = True

    @property
    def carrier(self) -> str:
        """How its messages travel: socket or stream."""
        return "stream" if self.socket is None else "socket"

    def offers(self, name: str, version: str) -> bool:
        """Whether a sequence may be opened at a drafter; without a version, at any of its name."""
        return any(
            each.name == name
            and (each.version == version if version else True)
            and not each.draining
            for each in self.drafters.drafters
        )

    def version(self, name: str, version: str) -> DrafterVersion:
        """A version, with the method that was announced for it; without one, no method."""
        methods = (
            each.method
            for each in self.drafters.drafters
            if each.name == name and each.version == version
        )
        return DrafterVersion(
            name, version[: limits.NAME_CHARS], next(methods, "")[: limits.NAME_CHARS]
        )

    def preference(self) -> tuple[int, bool, int]:
        """The lowest of several services that offer a drafter gets a sequence."""
        return self.failures, self.socket is None, len(self.sequences)

    def forget(self, number: int) -> None:
        """A sequence is open no more. What the service has sent meanwhile is at most that it was
        opened, a tree, and that it is refused."""
        del self.sequences[number]
        self.late = min(self.late + 3, limits.LATE_ANSWERS)

    def close(self, number: int) -> None:
        """Have the service close a sequence. One whose opening was not sent is not sent at all."""
        message = self.message
        _remove(message.rounds, number)
        if not _remove(message.open, number):
            message.closed.append(number)

    def send(self, message: exchange_pb2.JoinResponse) -> None:
        """Send a message without a wait. Raises ``PeerGone`` if the socket is closed, or the peer
        does not read."""
        if self.socket is None:
            self.write(message)
        else:
            self.socket.send(message.SerializeToString())


def _remove(parts: Any, number: int) -> bool:
    """Remove the parts of a message that are of a sequence; returns whether there were any."""
    found = [index for index, part in enumerate(parts) if part.sequence == number]
    for index in reversed(found):
        del parts[index]
    return bool(found)


@dataclass(slots=True, eq=False)
class SequenceAtDrafter:
    """A generation that is open at a drafter service."""

    link: Link  # the service
    number: int  # its number there
    job: DraftedText  # the generation
    name: str  # name of the drafter
    sent: int  # tokens of the text that were sent
    asked_at: float  # when its tree, or the sequence, was requested (time.perf_counter)
    # What the service answered; None if it has not answered.
    opened: exchange_pb2.SequenceOpened | None = None
    # The version that drafts; None: the service has not answered.
    drafter: DrafterVersion | None = None
    round: int = 0  # number of the newest round
    pending: bool = False  # whether its tree has not come
    budget: int = 0  # nodes that were requested at most
    traceparent: str = ""  # of the span of its newest round; empty if that is not traced

    @property
    def usual(self) -> float | None:
        """Mean latency of its version's trees; None if none has come. Unit: seconds."""
        return None if self.drafter is None else self.link.latency.get(self.drafter)


def eligible(
    links: Iterable[exchange_pb2.DrafterList], drafter: str
) -> list[drafter_pb2.DrafterInfo]:
    """All versions of a drafter that a generation may be given, by the drafters of each service
    that has joined and NAME, NAME@VERSION, or nothing for the default."""
    lists = list(links)
    name, _, version = drafter.partition("@")
    if not drafter:
        lists = [each for each in lists if each.default_drafter][:1]
        name = lists[0].default_drafter if lists else ""
    return [
        each
        for listed in lists
        for each in listed.drafters
        if each.name == name and (each.version == version if version else each.traffic_share > 0)
    ]


def hidden_states(
    links: Iterable[exchange_pb2.DrafterList], drafter: str
) -> tuple[tuple[int, ...], int]:
    """Hidden states that a drafter reads, over all its versions that are :func:`eligible`: layers,
    counted from 0 and rising, and the number of newest positions; 0: all."""
    reading = [each for each in eligible(links, drafter) if each.hidden_state_layers]
    windows = [each.hidden_state_window for each in reading]
    layers = {layer for each in reading for layer in each.hidden_state_layers}
    return tuple(sorted(layers)), max(windows) if windows and all(windows) else 0
