"""Spans noted now and made later, many at a time.

To begin and end a span takes the SDK some 20 microseconds when it does nothing else, but ten times
that between the steps of a model, with cold caches; and a round has five. So a round only notes
what its spans will say, and draws their ids, which go out with its messages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import time_ns
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast
from weakref import WeakSet

from paceline.telemetry.tracing import Attributes, fail, remote_parent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import SpanKind

FULL = 64
"""Notes that are worth making spans of."""

DELAY_SECONDS = 0.5
"""A service makes spans at least this often."""


class Note(NamedTuple):
    """What a span will say."""

    name: str
    parent: str
    """Its traceparent; nothing comes of a note whose parent is malformed or not recorded."""
    kind: SpanKind
    began_ns: int
    ended_ns: int
    attributes: Callable[[], Attributes]
    """Called when the span is made."""
    span_id: int | None = None
    """Its id, where children already know it as their parent."""
    error: BaseException | None = None
    remote: bool = True
    """Whether the parent is of another process."""


class Recorder:
    """Keeps notes and makes spans of them. Belongs to one thread."""

    _all: ClassVar[WeakSet[Recorder]] = WeakSet()

    def __init__(self, tracer: Tracer) -> None:
        """Take a tracer of one's own: it gets another id generator."""
        self._ids = _Ids(tracer.id_generator)
        tracer.id_generator = cast("IdGenerator", self._ids)
        self._tracer = tracer
        self._notes: list[Note] = []
        self._all.add(self)

    @classmethod
    def flush_all(cls) -> None:
        """Make spans of the notes of all recorders: the process ends."""
        for recorder in list(cls._all):
            recorder.flush()

    @property
    def full(self) -> bool:
        """Whether it is time to flush, at a moment when nobody waits."""
        return len(self._notes) >= FULL

    def add(self, note: Note) -> None:
        """Keep a note."""
        self._notes.append(note)

    def flush(self) -> None:
        """Make spans of all notes."""
        notes, self._notes = self._notes, []
        for note in notes:
            parent = remote_parent(note.parent, remote=note.remote)
            if parent is None:
                continue
            self._ids.next = note.span_id
            span = self._tracer.start_span(
                note.name, parent, note.kind, note.attributes(), start_time=note.began_ns
            )
            if note.error is not None:
                fail(span, note.error)
            span.end(note.ended_ns)


class ServiceSpans:
    """A service's spans of its callers' messages. Belongs to its event loop."""

    def __init__(self, tracer: Tracer) -> None:
        """Take a tracer of one's own."""
        from opentelemetry.trace import SpanKind

        self._kind = SpanKind.SERVER
        self._recorder = Recorder(tracer)
        self._due = False

    def add(
        self,
        name: str,
        traceparent: str,
        began_ns: int,
        attributes: Callable[[], Attributes],
        error: BaseException | None = None,
    ) -> None:
        """Note a span that ends now; it is made within DELAY_SECONDS.

        Args:
            name: One of `names.Span`.
            traceparent: As the caller sent it.
            began_ns: When the message came in. Unit: nanoseconds since 1970.
            attributes: By `names.Attribute`.
            error: What went wrong, if something did.
        """
        note = Note(name, traceparent, self._kind, began_ns, time_ns(), attributes, error=error)
        self._recorder.add(note)
        if self._recorder.full:
            self._recorder.flush()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(DELAY_SECONDS, self._flush)

    def _flush(self) -> None:
        self._due = False
        self._recorder.flush()


def new_span_id() -> int:
    """An id for a span that is to come; never 0."""
    return random.getrandbits(64) or 1


class _Ids:
    """The SDK's ids, but where the next one was given out before."""

    def __init__(self, source: IdGenerator) -> None:
        self.next: int | None = None
        self._source = source

    def generate_span_id(self) -> int:
        given, self.next = self.next, None
        return self._source.generate_span_id() if given is None else given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
