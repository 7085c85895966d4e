"""Drafter services at the engine: which sequence is open where, and the trees on their way.

The engine thread reads and writes their sockets itself, between two steps: one message each way
for all sequences of a service. Services without a socket use the gRPC stream of their Join call,
through the event loop. Nothing here waits, and nothing that a service sends changes a token.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from google.protobuf.message import DecodeError

from paceline.service import ServiceError, limits
from paceline.service.exchange import PeerGone, Waiter
from paceline.service.messages import MessageTooLarge, parse
from paceline.telemetry.tracing import child_traceparent
from paceline.tree import TokenTree
from paceline.v1 import exchange_pb2, tree_pb2
from paceline.verifier.engine.drafted import DraftedText, Link, SequenceAtDrafter
from paceline.verifier.engine.report import (
    LOCAL,
    Draft,
    DraftCall,
    NoDraft,
    StepReport,
    microseconds,
)

_log = logging.getLogger(__name__)

_USUAL = 1.3  # times the mean latency
_TIMEOUT_FACTOR = 8.0  # default timeout of a tree, as a multiple of the drafter's mean latency

# Bounds of the default timeout. A version of which no tree has come yet has the maximum: its first
# tree tells how long it takes. Unit: seconds.
_MIN_TIMEOUT, _MAX_TIMEOUT = 0.05, 2.0

_NEWEST = 0.2  # weight of the newest tree in the mean latency

# A drafter that owes a tree, or has not opened a sequence, for this long has failed. It reads the
# text before it is open, for which it has more time for each token. Unit: seconds.
HUNG_SECONDS, _READ_SECONDS = 10.0, 0.01

# Bounds of the delay before a sequence is opened again after a failure. Unit: seconds.
FIRST_DELAY, _MAX_DELAY = 0.1, 10.0

# Reason of a refusal that is no failure: the sequence is opened again at another version.
_REPLACED = "DRAFTER_REPLACED"

# Length of the longest reason of a failure that clients are told. Unit: characters.
_MAX_REASON = 1024

_MAX_KV_BYTES = 1 << 48  # maximum number of bytes that is taken from a drafter's report

# A drafter is called unused if so many steps, and so many for each of its trees, were without one.
# Counts are halved when they reach the second number. Unit: steps.
_FEW, _REMEMBERED = 48, 2048

_MAX_USES = 64  # drafters whose use is counted: clients choose names

_WHY = {  # reasons of an unused drafter, in words. Other steps without a tree need none.
    NoDraft.NODE_BUDGET: "by the times measured so far drafting does not pay",
    NoDraft.NOT_READY: "it has not opened the texts",
    NoDraft.LATE: "its trees come too late",
}

# Reads and checks a drafted tree for a job; raises ServiceError.
ReadTree = Callable[[tree_pb2.TokenTree, DraftedText], TokenTree]


@dataclass(slots=True)
class DrafterUse:
    """How often a drafter is used in texts that name it, or have it by default."""

    asked: int = 0  # trees that were requested
    drafted: int = 0  # steps with a tree of it
    missed: Counter[NoDraft] = field(default_factory=Counter)  # steps without, by the reason
    # Why hardly any step has a tree of it; None: enough have. Any thread may read it.
    unused: NoDraft | None = None
    said: set[NoDraft] = field(default_factory=set)  # reasons that were logged

    def note(self, why: NoDraft | None) -> None:
        """Count a step; ``why`` it had no tree, None with one."""
        if why is None:
            self.drafted += 1
        else:
            self.missed[why] += 1
        missed = self.missed.total()
        self.unused = None
        if missed >= _FEW * max(1, self.drafted):
            self.unused = self.missed.most_common(1)[0][0]
        if missed + self.drafted >= _REMEMBERED:
            self.asked, self.drafted = self.asked // 2, self.drafted // 2
            self.missed = Counter({why: count // 2 for why, count in self.missed.items()})


class Drafting:
    """All drafter services of one verifier. Only the engine thread uses it.

    Safety contract: a service gets the texts only of generations that name one of its
    drafters, or none while it is the first that joined. Whatever it sends, a tree is checked before
    the engine verifies it; a tree that is wrong closes its sequence, a message that breaks the
    protocol ends the connection.
    """

    def __init__(self, waiter: Waiter, read_tree: ReadTree, *, strict: bool = False) -> None:
        """Make it without services; ``waiter`` is the engine thread's. ``strict``: an invalid tree
        ends the connection of its service, not only its sequence."""
        self.links: list[Link] = []  # the services, in the order of joining
        # Jobs that wait for a tree, with the time at which they stop waiting (time.perf_counter).
        self.waiting: dict[DraftedText, float] = {}
        self.ready: list[
            DraftedText
        ] = []  # jobs whose wait is over; the engine queues and clears them
        # Use of drafters, by NAME or NAME@VERSION as texts name them.
        self.uses: dict[str, DrafterUse] = {}
        self._waiter = waiter
        self._read_tree = read_tree
        self._strict = strict
        self._defaults: list[tuple[str, tuple[str, ...]]] = []
        self._by_descriptor: dict[int, Link] = {}
        self._unread: set[int] = set()

    def join(self, link: Link) -> None:
        link.joined = True
        self.links.append(link)
        self._note_defaults()
        if link.socket is not None:
            self._by_descriptor[link.socket.fileno()] = link
            self._waiter.add(link.socket.fileno())

    def leave(self, link: Link, why: str = "the drafter service has left") -> None:
        """Use a service no more; its sequences go on without it. A second call does nothing."""
        if not link.joined:
            return
        link.joined = False
        self.links.remove(link)
        self._note_defaults()
        if link.socket is not None:
            self._by_descriptor.pop(link.socket.fileno(), None)
            self._waiter.remove(link.socket.fileno())
            self._unread.discard(link.socket.fileno())
            link.socket.close()
        for sequence in list(link.sequences.values()):
            self._drop(sequence, "drafter_unavailable", why)

    def update(self, link: Link, drafters: exchange_pb2.DrafterList) -> None:
        """Take over the changed drafters of a service; close sequences of drafters now gone."""
        link.drafters = drafters
        self._note_defaults()
        names = {drafter.name for drafter in drafters.drafters}
        for sequence in list(link.sequences.values()):
            if sequence.name not in names:
                link.close(sequence.number)
                self._drop(sequence, "drafter_unavailable", "the drafter was unloaded")

    def name_of(self, job: DraftedText) -> str | None:
        """Return the name of the drafter that a generation uses; None if it has none."""
        if job.drafter is None or job.drafter == LOCAL.name:
            return None
        if job.drafter:
            return job.drafter.partition("@")[0]
        for name, methods in self._defaults:
            # The verifier itself guesses what a drafter of a method that it covers would.
            covered = job.local is not None and all(map(job.local.covers, methods))
            if not (covered and methods):
                return name
        return None

    def _note_defaults(self) -> None:
        """Note the default drafter of each service and its methods: to read the messages for each
        step of each generation would take longer than a look-up."""
        self._defaults = [
            (name, tuple(info.method for info in link.drafters.drafters if info.name == name))
            for link in self.links
            if (name := link.drafters.default_drafter)
        ]

    def ask(self, job: DraftedText, nodes: int, now: float) -> bool:
        """Request a tree of at most so many nodes for the next step of a generation, which waits
        then. It is sent by :meth:`flush`.

        While a service opens the sequence, and reads its text, the generation goes on without
        trees, unless it drafts in every step.

        Return whether it was requested. If not, the job's ``no_draft`` says why.
        """
        job.no_draft = NoDraft.NOT_READY
        sequence = job.at_drafter or self._open(job, now)
        if sequence is None:
            return False
        if sequence.pending or (sequence.opened is None and not job.always_draft):
            reads = _READ_SECONDS * sequence.sent if sequence.opened is None else 0.0
            if now - sequence.asked_at > HUNG_SECONDS + reads:
                sequence.link.close(sequence.number)
                self._drop(
                    sequence, "drafter_hung", f"no answer came in {HUNG_SECONDS + reads:g} s"
                )
            return False
        text = job.text
        limits = (nodes, job.max_nodes, sequence.opened.max_nodes if sequence.opened else 0)
        sequence.budget = min(limit for limit in limits if limit)
        sequence.round += 1
        sequence.pending, sequence.asked_at = True, now
        sequence.traceparent = ""
        if job.trace is not None and job.trace.traced:
            sequence.traceparent = child_traceparent(job.trace.traceparent)
        timeout = self._timeout(sequence)
        self._use(job.drafter or sequence.name).asked += 1
        sequence.link.message.rounds.add(
            sequence=sequence.number,
            round=sequence.round,
            new_tokens=text.tokens[sequence.sent :],
            node_budget=sequence.budget,
            max_depth=text.room - 1,  # the last token of a step is the target's own
            timeout_us=round(timeout * 1e6),
            committed_length=job.committed,
            total_length=len(text),
            traceparent=sequence.traceparent,
        )
        sequence.sent = len(text)
        self.waiting[job] = now + timeout
        return True

    def note(self, job: DraftedText, report: StepReport) -> None:
        """Count a step for the drafter that its text names, or has by default. What drafts in
        hardly any step is logged, once for each reason."""
        name = job.drafter or self.name_of(job)
        if not name or name == LOCAL.name:
            return
        why = report.no_draft
        if report.drafter == LOCAL or why not in (None, *_WHY):
            return  # nothing more was to be had
        sequence = job.at_drafter
        if why is NoDraft.NOT_READY and sequence and sequence.pending and sequence.opened:
            why = NoDraft.LATE  # it owes a tree of an earlier step
        use = self._use(name)
        use.note(why)
        if use.unused is None or use.unused in use.said:
            return
        use.said.add(use.unused)
        reason = _WHY[use.unused]
        if use.unused is NoDraft.NOT_READY and not any(
            link.offers(*name.partition("@")[::2]) for link in self.links
        ):
            reason = "no drafter service that has joined offers it"
        _log.warning(
            "the drafter %s drafted in %d of %d steps, and was asked in %d: %s",
            name, use.drafted, use.drafted + use.missed.total(), use.asked, reason,
        )  # fmt: skip

    def _use(self, name: str) -> DrafterUse:
        if name not in self.uses and len(self.uses) >= _MAX_USES:
            del self.uses[next(iter(self.uses))]
        return self.uses.setdefault(name, DrafterUse())

    def arrivals(self) -> list[float]:
        """Return when the trees that jobs wait for are there at the latest, if their drafters take
        little longer than usual (time.perf_counter)."""
        asked = [job.at_drafter for job in self.waiting]
        return [
            sequence.asked_at + _USUAL * sequence.usual
            for sequence in asked
            if sequence is not None and sequence.usual is not None
        ]

    @property
    def unread(self) -> bool:
        """Whether messages were read from sockets that the last call of `read` did not take."""
        return bool(self._unread)

    def read(self, descriptors: Iterable[int]) -> None:
        """Take what sockets have: of each one read, and at most ``STEP_MESSAGES`` messages."""
        ready, self._unread = {*descriptors, *self._unread}, set()
        for descriptor in ready:
            link = self._by_descriptor.get(descriptor)
            if link is None or link.socket is None:
                continue
            try:
                if link.socket.unsent:
                    link.socket.flush()
                    self._waiter.watch_writable(descriptor, writable=link.socket.unsent)
                for frame in link.socket.receive(limits.STEP_MESSAGES):
                    if link.joined:
                        self.receive(
                            link, parse(exchange_pb2.JoinRequest, frame, limits.FRAME_BYTES)
                        )
                if link.joined and link.socket.has_message:
                    self._unread.add(descriptor)
            except PeerGone as gone:
                self._fail(link, ServiceError.unavailable("DRAFTER_GONE", str(gone)))
            except MessageTooLarge as large:
                self._fail(link, ServiceError.invalid_argument("MESSAGE_TOO_LARGE", str(large)))
            except DecodeError:
                error = "a message on the socket is not a JoinRequest; send only those"
                self._fail(link, ServiceError.invalid_argument("BAD_MESSAGE", error))

    def receive(self, link: Link, message: exchange_pb2.JoinRequest) -> None:
        if not link.joined:
            return
        try:
            answers = message.opened or message.trees or message.refused
            if not answers and (link.socket is not None or not message.HasField("drafters")):
                raise ServiceError.invalid_argument(
                    "EMPTY_MESSAGE", "a message answers nothing: send trees, or what was opened"
                )
            for opened in message.opened:
                sequence = self._find(link, opened.sequence)
                if sequence is not None and sequence.opened is not None:
                    raise ServiceError.invalid_argument(
                        "OPENED_TWICE",
                        f"the sequence {sequence.number} was opened before: say so once",
                    )
                if sequence is not None:
                    sequence.opened = exchange_pb2.SequenceOpened(  # a part keeps its message
                        max_nodes=opened.max_nodes,
                        kv_transport=opened.kv_transport[: limits.NAME_CHARS],
                    )
                    sequence.drafter = link.version(sequence.name, opened.version)
            for tree in message.trees:
                sequence = self._find(link, tree.sequence)
                if sequence is not None:
                    self._drafted(sequence, tree)
            for refused in message.refused:
                sequence = self._find(link, refused.sequence)
                if sequence is not None and refused.reason == _REPLACED:
                    self._forget(sequence)
                elif sequence is not None:
                    why = f"{refused.reason}: {refused.message}"
                    self._drop(sequence, "drafter_refused", why, wrong=True)
        except ServiceError as error:
            self._fail(link, error)

    def expire(self, now: float) -> None:
        late = [job for job, until in self.waiting.items() if until <= now]
        for job in late:
            sequence = job.at_drafter
            assert sequence is not None, "a text waits for what it is open at"
            if sequence.opened is not None:
                job.no_draft = NoDraft.LATE
                seconds = now - sequence.asked_at
                sequence.link.failures += 1
                job.fallbacks.append(("drafter_timeout", f"no tree came in {seconds:.3f} s"))
            self._resume(sequence)

    def close(self, job: DraftedText) -> None:
        self.waiting.pop(job, None)
        sequence, job.at_drafter = job.at_drafter, None
        if sequence is not None:
            sequence.link.forget(sequence.number)
            sequence.link.close(sequence.number)

    def flush(self, step: int) -> None:
        """Send what was requested since the last call: one message for each service."""
        for link in tuple(self.links):
            message = link.message
            if not (message.rounds or message.closed or message.open):
                continue
            message.step = step
            link.message = exchange_pb2.JoinResponse()
            try:
                link.send(message)
            except PeerGone as gone:
                self._fail(link, ServiceError.unavailable("DRAFTER_GONE", str(gone)))
                continue
            if link.socket is not None and link.socket.unsent:
                self._waiter.watch_writable(link.socket.fileno(), writable=True)

    def _open(self, job: DraftedText, now: float) -> SequenceAtDrafter | None:
        """Open a generation at a service that has its drafter; None if it cannot be opened now."""
        if now < job.retry_at:
            return None
        name, _, version = (job.drafter or self.name_of(job) or "").partition("@")
        offering = [link for link in self.links if link.offers(name, version)]
        if not job.drafter:
            offering = offering[:1]
        if not offering:
            return None
        link = min(offering, key=Link.preference)
        link.last += 1
        text = job.text
        sequence = SequenceAtDrafter(link, link.last, job, name, len(text), now)
        link.sequences[link.last] = job.at_drafter = sequence
        link.message.open.add(
            sequence=sequence.number,
            drafter=name,
            version=version,
            tokens=text.tokens,
            prompt_length=text.prompt_length,
            sampling=text.message,
            read_grant=job.read_grant,
            owner="" if job.isolated else text.owner,
            traceparent="" if job.trace is None else job.trace.traceparent,
        )
        return sequence

    def _timeout(self, sequence: SequenceAtDrafter) -> float:
        if sequence.job.timeout is not None:
            return sequence.job.timeout
        if (usual := sequence.usual) is None:
            return _MAX_TIMEOUT
        return min(_MAX_TIMEOUT, max(_MIN_TIMEOUT, _TIMEOUT_FACTOR * usual))

    def _find(self, link: Link, number: int) -> SequenceAtDrafter | None:
        """Return an open sequence; None if it was closed. Raises ``ServiceError`` if the number was
        never given to the service, or closed sequences are answered more often than they can be by
        answers that were on their way."""
        if not 0 < number <= link.last:
            raise ServiceError.invalid_argument(
                "UNKNOWN_SEQUENCE",
                f"a message names the sequence {number}, expected 1 to {link.last}: answer only "
                "those that were opened here",
            )
        sequence = link.sequences.get(number)
        if sequence is None:
            link.late -= 1
            if link.late < 0:
                raise ServiceError.invalid_argument(
                    "CLOSED_SEQUENCE",
                    f"the sequence {number} is closed, and was answered before: answer each round "
                    "once, and none after its sequence was closed",
                )
        return sequence

    def _drafted(self, sequence: SequenceAtDrafter, message: exchange_pb2.DraftedTree) -> None:
        """Take a tree. Raises ``ServiceError`` if it is for another round than the one that was
        requested."""
        if message.round != sequence.round or not sequence.pending:
            raise ServiceError.invalid_argument(
                "WRONG_ROUND",
                f"a tree is for round {message.round} of sequence {sequence.number}, expected one "
                f"tree for round {sequence.round}",
            )
        now, job, link = perf_counter(), sequence.job, sequence.link
        sequence.pending = False
        # The first one of a text that always drafts has waited for its sequence to be opened.
        if sequence.drafter is not None and (sequence.round > 1 or not job.always_draft):
            latency, usual = now - sequence.asked_at, sequence.usual
            mean = latency if usual is None else usual + _NEWEST * (latency - usual)
            link.latency[sequence.drafter] = mean
        if job not in self.waiting:
            return  # too late: its step went on
        try:
            if len(message.tree.tokens) > sequence.budget:
                raise ServiceError.invalid_argument(
                    "TREE_TOO_LARGE",
                    f"the tree has {len(message.tree.tokens)} nodes, expected at most "
                    f"{sequence.budget}",
                )
            tree = job.merge_guess(self._read_tree(message.tree, job), sequence.budget)
        except ServiceError as error:
            if self._strict:
                raise
            link.close(sequence.number)
            why = f"{error.reason}: the drafter {sequence.name!r} sent an invalid tree: {error}"
            self._drop(sequence, "invalid_tree", why, wrong=True)
            return
        link.failures = 0
        if len(tree):
            job.failures = 0
            max_us = microseconds(now - sequence.asked_at)
            job.set_draft(
                Draft(
                    tree,
                    sequence.drafter or link.version(sequence.name, ""),
                    now - sequence.asked_at,
                    min(message.draft_us, max_us),
                    min(message.queue_us, max_us),
                    min(message.kv_bytes, _MAX_KV_BYTES),
                )
            )
        job.no_draft = NoDraft.EMPTY
        self._resume(sequence)

    def _drop(
        self, sequence: SequenceAtDrafter, reason: str, why: str, *, wrong: bool = False
    ) -> None:
        """Forget a sequence after a failure; its generation goes on and tries again later."""
        job = sequence.job
        delay = min(_MAX_DELAY, FIRST_DELAY * 2 ** min(job.failures + 3 * wrong, 16))
        job.failures += 1
        sequence.link.failures += 1
        job.retry_at = perf_counter() + delay
        why = why[:_MAX_REASON]
        job.fallbacks.append((reason, why))
        _log.info("drafting failed", extra={"reason": reason, "fault": why})
        self._forget(sequence)

    def _forget(self, sequence: SequenceAtDrafter) -> None:
        """Forget a sequence that is closed; its generation goes on."""
        sequence.link.forget(sequence.number)
        sequence.job.at_drafter = None
        if sequence.job in self.waiting:
            self._resume(sequence)

    def _resume(self, sequence: SequenceAtDrafter) -> None:
        job = sequence.job
        del self.waiting[job]
        if sequence.traceparent:
            transport = "" if sequence.opened is None else sequence.opened.kv_transport or "none"
            job.call = DraftCall(
                sequence.traceparent,
                sequence.asked_at,
                perf_counter(),
                sequence.name,
                sequence.link.carrier,
                transport,
                job.no_draft if job.draft is None else None,
            )
        self.ready.append(job)

    def _fail(self, link: Link, error: ServiceError) -> None:
        _log.warning("a drafter service was disconnected", extra={"fault": error.message})
        self.leave(link, error.message)
        link.end(error)
