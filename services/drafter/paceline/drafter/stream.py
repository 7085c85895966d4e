"""One Draft stream: its text, the version that drafts for it, and its way to another version."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

from paceline.drafter.kv import KvExchange, KvGone, KvNotShared
from paceline.drafter.methods.base import Budget, Generation, Update
from paceline.drafter.recordings import Recording
from paceline.drafter.registry import Registry, Sample, Version
from paceline.drafter.session import Session
from paceline.drafter.tree import EMPTY, Tree
from paceline.drafter.validation import check_fit, check_tokens
from paceline.drafter.worker import Drafted, DraftWorker
from paceline.service import ServiceError
from paceline.v1 import drafter_pb2

if TYPE_CHECKING:
    from paceline.drafter.telemetry import Telemetry


class Stream:
    """One attached generation. Belongs to its handler, which closes it however it ends.

    When its version is unloaded, the stream goes to the one that takes over, between two rounds and
    with its whole text, as if it had just attached. It stays where it is, until it ends, if its
    client asked for this very version, or if the other does not fit: another target, hidden states
    that the client was not asked for, KV that cannot be read.
    """

    def __init__(
        self,
        attach: drafter_pb2.DraftAttach,
        version: Version,
        registry: Registry,
        worker: DraftWorker,
        exchange: KvExchange,
        telemetry: Telemetry | None,
    ) -> None:
        """Count as attached to a version; :meth:`open` does the rest.

        Args:
            attach: The stream's from now on.
            version: As the registry chose it, in the same step of the event loop.
            registry: Knows who takes over, and hears how versions do.
            worker: Drafts.
            exchange: Maps KV, or follows it.
            telemetry: Hears who attaches and leaves; None: nobody does.
        """
        self.tokens = array("I", attach.tokens)
        """The text so far."""
        self.version = version
        self._attach = attach
        # The rest of it is kept, for a version that takes over; the text grows, in `tokens`.
        attach.ClearField("tokens")
        self._registry = registry
        self._worker = worker
        self._exchange = exchange
        self._telemetry = telemetry
        self._session: Session | None = None
        self._unfit: Version | None = None
        self._eviction = _Eviction()
        registry.attach(version, self._eviction)

    @property
    def vocab_size(self) -> int:
        """Token ids that both target and version know."""
        target = self._attach.vocab_size
        return min(target, self.version.drafter.fit.vocab_size or target)

    @property
    def went_on(self) -> bool:
        """Whether anything is known to follow the prompt."""
        return 0 < self._attach.prompt_length < len(self.tokens)

    def recording(self) -> Recording:
        """The text, to be kept. Nothing may be added to it any more.

        Raises:
            ValueError: It is too long.
        """
        start, sampling = self._attach.prompt_length, self._attach.sampling
        return Recording(
            tuple(self.tokens[:start]),
            tuple(self.tokens[start:]),
            sampling.temperature,
            sampling.seed,
            self._attach.target_fingerprint,
        )

    @property
    def kv_transport(self) -> str:
        """How the version reads the target's KV: map, follow, or empty for not at all."""
        return "" if self._session is None else self._session.kv_transport

    def new_kv_bytes(self) -> int:
        """Bytes of the target's KV that came over a wire since it was last asked."""
        return 0 if self._session is None else self._session.newly_received()

    async def open(self) -> None:
        """Start the version's sequence.

        Raises:
            ServiceError: KV_NOT_SHARED.
        """
        self._session = await self._start(self.version)

    async def warm(self) -> None:
        """Begin with the text so far."""
        assert self._session is not None, "opened"
        await self._session.warm()

    async def follow(self) -> None:
        """Between two rounds: go to the version that takes over, if this one leaves."""
        successor = self._registry.successor(self.version)
        if successor is None or successor is self._unfit or self._attach.version:
            return
        self._registry.attach(successor, self._eviction)
        try:
            self._check_successor(successor)
            session = await self._start(successor)
        except BaseException as error:
            self._registry.detach(successor, self._eviction, Sample())
            if not isinstance(error, ServiceError):
                raise
            self._unfit = successor
            return
        self._leave(self.version)
        self.version, self._session = successor, session
        await session.warm()

    async def round(self, update: Update, budget: Budget) -> Drafted:
        """Take in the update and draft a tree.

        Raises:
            KvGone: The cache whose KV the version reads is gone.
        """
        assert self._session is not None, "opened"
        self.tokens.extend(update.tokens)
        try:
            drafted = await self._session.round(update, budget)
            if self.version.on_trial:
                _check_tree(drafted.tree, budget, self._attach.vocab_size)
            return drafted
        except KvGone:
            raise
        except Exception as error:
            if not self.version.on_trial:
                raise
            # What is on trial costs no stream: the next round goes to another version.
            self._registry.failed(self.version, f"{type(error).__name__}: {error}")
            return Drafted(EMPTY, 0.0, 0.0)

    def close(self) -> None:
        """Free the sequence, and leave the version."""
        self._leave(self.version)

    def raise_if_evicted(self) -> None:
        """Raise UNAVAILABLE with DRAFTER_UNLOADED if a forced unload cancelled the handler."""
        if self._eviction.done:
            self._eviction.forget()
            raise ServiceError.unavailable(
                "DRAFTER_UNLOADED",
                f"version {self.version.version!r} of drafter {self.version.spec.name!r} was "
                "unloaded; attach again to get another version",
            )

    def _check_successor(self, version: Version) -> None:
        old, new = self.version.drafter.needs, version.drafter.needs
        if (old.hidden_state_layers, old.hidden_state_window) != (
            new.hidden_state_layers,
            new.hidden_state_window,
        ):
            raise ServiceError.failed_precondition(
                "OTHER_HIDDEN_STATES", "the client was asked for other hidden states"
            )
        check_fit(self._attach, version.drafter, version.spec.name)
        known = version.drafter.fit.vocab_size
        if known:
            check_tokens("text", self.tokens, known)

    def _leave(self, version: Version) -> None:
        session, self._session = self._session, None
        sample = Sample()
        if session is not None:
            sample = session.sample
            session.close()
            if self._telemetry is not None:
                self._telemetry.detached(session)
        self._registry.detach(version, self._eviction, sample)

    async def _start(self, version: Version) -> Session:
        if self._telemetry is None:
            return await self._new_session(version)
        with self._telemetry.attaching(version, self._attach.traceparent):
            session = await self._new_session(version)
            self._telemetry.attached(session)
            return session

    async def _new_session(self, version: Version) -> Session:
        attach, kv = self._attach, None
        needs = version.drafter.needs
        if needs.kv_layers:
            try:
                kv = await self._exchange.open(
                    attach.verifier_address,
                    attach.read_grant,
                    needs.kv_layers,
                    needs.kv_options,
                    needs.kv_budget_at(len(self.tokens)),
                )
            except KvNotShared as error:
                raise ServiceError.failed_precondition(
                    "KV_NOT_SHARED",
                    f"drafter {version.spec.name!r} reads the target's KV, but {error}; go on "
                    "with a drafter that needs tokens only",
                ) from error
        states = None
        if needs.hidden_state_layers:
            try:
                states = await self._exchange.open_states(
                    attach.verifier_address,
                    attach.read_grant,
                    needs.hidden_state_layers,
                    needs.hidden_state_window,
                    needs.hidden_state_transport,
                )
            except KvNotShared as error:
                if kv is not None:
                    kv.close()
                raise ServiceError.failed_precondition(
                    "HIDDEN_STATES_NOT_SHARED",
                    f"drafter {version.spec.name!r} reads the target's hidden states, but {error}; "
                    "go on with a drafter that needs tokens only",
                ) from error
        generation = Generation(
            tokens=list(self.tokens),
            prompt_length=attach.prompt_length,
            vocab_size=attach.vocab_size,
            sampling=attach.sampling,
            read_grant=attach.read_grant,
            verifier_address=attach.verifier_address,
            kv=kv,
            states=states,
        )
        try:
            sequence = version.drafter.start(generation)
        except BaseException:
            for each in (kv, states):
                if each is not None:
                    each.close()
            raise
        return Session(
            version.drafter, sequence, self._worker, kv, states, sampling=attach.sampling
        )


class _Eviction:
    """Ends a stream from outside: cancels its handler."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.done = False
        """Whether it was this that cancelled the handler."""

    def __call__(self) -> None:
        self.done = True
        if self._task is not None:
            self._task.cancel()

    def forget(self) -> None:
        """The handler goes on, to say why it ends."""
        if self._task is not None:
            self._task.uncancel()


def _check_tree(tree: Tree, budget: Budget, vocab_size: int) -> None:
    tree.check(vocab_size)
    if len(tree) > budget.nodes:
        raise ValueError(f"a tree of {len(tree)} nodes, expected at most {budget.nodes}")
