"""DrafterService: streams attach, catch up with their text, draft a tree per round, and answer."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from paceline.drafter.kv.errors import KvGone
from paceline.drafter.kv.exchange import KvExchange
from paceline.drafter.methods.base import Budget, Generation, Update
from paceline.drafter.recordings import Recorder, Recording
from paceline.drafter.registry import Registry, Version
from paceline.drafter.session import Session, open_session
from paceline.drafter.statistics import DraftStatistics
from paceline.drafter.telemetry import Telemetry
from paceline.drafter.validation import check_attach, check_fit, check_length, check_tokens
from paceline.drafter.worker import Drafted, DraftWorker
from paceline.service import Gate, ServiceError
from paceline.service.identity import owner_of
from paceline.tree import EMPTY
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves Draft streams.

    Args:
        registry: Chooses versions.
        worker: Runs methods that are not inline.
        exchange: Opens the target's KV and hidden states.
        telemetry: Receives what streams do.
        recorder: Records the token ids of generations; None: nothing is recorded.
        max_context: Longest text. Unit: tokens.
        max_streams: Maximum number of attached streams.
    """

    def __init__(
        self,
        registry: Registry,
        worker: DraftWorker,
        exchange: KvExchange,
        telemetry: Telemetry,
        recorder: Recorder | None,
        *,
        max_context: int,
        max_streams: int,
    ) -> None:
        self.gate = Gate()
        """Attached streams."""
        self.registry = registry
        self.worker = worker
        self.exchange = exchange
        self.telemetry = telemetry
        self.recorder = recorder
        self.max_context = max_context
        self._max_streams = max_streams

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Context
    ) -> None:
        """Serves one generation. Reads from the context: an iterator would cost time per round."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        with self.gate.enter():
            if self.gate.inside > self._max_streams:
                raise ServiceError.resource_exhausted(
                    "TOO_MANY_STREAMS",
                    f"this drafter serves at most {self._max_streams} generations; generate "
                    "without drafts and attach later",
                    retry_after=1.0,
                )
            if first.WhichOneof("event") != "attach":
                raise ServiceError.invalid_argument(
                    "NOT_ATTACHED", "the first message of a Draft stream must be an attach"
                )
            await _Stream(self, first.attach, owner_of(context)).run(context)


class _Stream:
    """One attached generation.

    When its version is unloaded, the stream moves to the version that replaces it, between two
    rounds, with its whole text, as if it had just attached. It stays if its client requested this
    version, or if the other version does not fit: another target, hidden states that the cache does
    not keep, KV that cannot be read.
    """

    def __init__(
        self, service: DrafterServicer, attach: drafter_pb2.DraftAttach, owner: str
    ) -> None:
        """Check an attach and choose a version.

        Raises:
            ServiceError: The attach is wrong, or no version fits.
        """
        check_attach(attach, service.max_context)
        self._service = service
        self._owner = owner
        self._registry = service.registry
        self._version = self._registry.choose(attach.drafter, attach.version)
        check_fit(attach, attach.tokens, self._version)
        self._tokens = array("I", attach.tokens)
        # The rest of the attach is kept for a version that replaces this one.
        self._attach = attach
        attach.ClearField("tokens")
        self._session: Session | None = None
        self._unfit: Version | None = None
        self._task = asyncio.current_task()
        self._evicted = False

    async def run(self, context: Context) -> None:
        """Serve the stream until it ends."""
        self._registry.attach(self._version, self._evict)
        try:
            self._session = await self._open(self._version)
            await context.write(self._attached())
            await self._session.catch_up()
            try:
                while (request := await context.read()) is not grpc.aio.EOF:
                    await self._round(request, context)
            finally:
                self._record()
        except KvGone as error:
            raise ServiceError.unavailable(
                "KV_GONE", f"{error}; attach again with the read grant of the cache in use"
            ) from error
        except asyncio.CancelledError:
            if not self._evicted or self._task is None:
                raise
            self._task.uncancel()
            raise ServiceError.unavailable(
                "DRAFTER_UNLOADED",
                f"version {self._version.version!r} of drafter {self._version.spec.name!r} was "
                "unloaded; attach again to get another version",
            ) from None
        finally:
            self._leave()

    async def _round(self, request: drafter_pb2.DraftRequest, context: Context) -> None:
        arrived = time.monotonic()
        if request.WhichOneof("event") != "round":
            raise ServiceError.invalid_argument(
                "ALREADY_ATTACHED", "after the attach every message must be a round"
            )
        await self._move()
        message, drafter = request.round, self._version.drafter
        update = self._append(message)
        budget = Budget(
            nodes=min(message.node_budget, drafter.max_nodes),
            depth=min(message.max_depth or drafter.max_depth, drafter.max_depth),
            deadline=arrived + message.deadline_ms / 1000 if message.deadline_ms else math.inf,
        )
        drafted = await self._draft(update, budget)
        await context.write(self._answer(message.round_id, drafted))
        self._service.telemetry.drafted(self._version, drafted, message.traceparent, arrived)

    def _append(self, message: drafter_pb2.DraftRound) -> Update:
        """Check the new tokens and add them to the text."""
        check_tokens("new_tokens", message.new_tokens, self._attach.vocab_size, self._version)
        length = len(self._tokens) + len(message.new_tokens)
        if message.total_length != length:
            raise ServiceError.failed_precondition(
                "OUT_OF_STEP",
                f"with these new tokens the text has {length} tokens here, but total_length is "
                f"{message.total_length}; attach again with all tokens",
            )
        check_length(length, self._service.max_context)
        self._tokens.extend(message.new_tokens)
        return Update(tuple(message.new_tokens), message.committed_length)

    async def _draft(self, update: Update, budget: Budget) -> Drafted:
        """Draft a tree. A canary that fails is rolled back, and the round gets an empty tree."""
        assert self._session is not None, "opened"
        version = self._version
        try:
            drafted = await self._session.draft(update, budget)
            if version.canary:
                drafted.tree.check(self._attach.vocab_size)
                if len(drafted.tree) > budget.nodes:
                    raise ValueError(
                        f"a tree of {len(drafted.tree)} nodes, expected at most {budget.nodes}"
                    )
        except Exception as error:
            if isinstance(error, KvGone) or not version.canary:
                raise
            self._registry.report_failure(version, f"{type(error).__name__}: {error}")
            return Drafted(EMPTY, 0.0, 0.0)
        return drafted

    async def _move(self) -> None:
        """Move to the version that replaces this one, if this one was unloaded."""
        successor = self._registry.successor(self._version)
        if successor is None or successor is self._unfit or self._attach.version:
            return
        self._registry.attach(successor, self._evict)
        try:
            check_fit(self._attach, self._tokens, successor, self._version)
            session = await self._open(successor)
        except BaseException as error:
            self._registry.detach(successor, self._evict, DraftStatistics())
            if not isinstance(error, ServiceError):
                raise
            self._unfit = successor
            return
        self._leave()
        self._version, self._session = successor, session
        await session.catch_up()

    def _leave(self) -> None:
        """Close the session and detach from the version."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self._service.telemetry.detached(session)
        statistics = DraftStatistics() if session is None else session.statistics
        self._registry.detach(self._version, self._evict, statistics)

    def _evict(self) -> None:
        """End the stream, for a forced unload."""
        self._evicted = True
        if self._task is not None:
            self._task.cancel()

    async def _open(self, version: Version) -> Session:
        attach, service = self._attach, self._service
        generation = Generation(
            tokens=list(self._tokens),
            prompt_length=attach.prompt_length,
            vocab_size=attach.vocab_size,
            sampling=attach.sampling,
            owner=self._owner,
            read_grant=attach.read_grant,
            verifier_address=attach.verifier_address,
        )
        with service.telemetry.attaching(version, attach.traceparent):
            session = await open_session(version, generation, service.worker, service.exchange)
            service.telemetry.attached(session)
            return session

    def _attached(self) -> drafter_pb2.DraftResponse:
        assert self._session is not None, "opened"
        version, drafter = self._version, self._version.drafter
        return drafter_pb2.DraftResponse(
            attached=drafter_pb2.DraftAttached(
                drafter=version.spec.name,
                version=version.version,
                method=version.spec.method,
                hidden_state_layers=drafter.needs.hidden_state_layers,
                hidden_state_window=drafter.needs.hidden_state_window,
                max_nodes=drafter.max_nodes,
                kv_transport=self._session.kv_transport,
            )
        )

    def _answer(self, round_id: int, drafted: Drafted) -> drafter_pb2.DraftResponse:
        assert self._session is not None, "opened"
        return drafter_pb2.DraftResponse(
            tree=drafter_pb2.DraftTree(
                round_id=round_id,
                tree=drafted.tree.to_proto(),
                draft_us=round(drafted.draft_seconds * 1e6),
                queue_us=round(drafted.queue_seconds * 1e6),
                version=self._version.version,
                kv_bytes=self._session.take_received_bytes(),
            )
        )

    def _record(self) -> None:
        """Record the text if something follows the prompt."""
        recorder, start = self._service.recorder, self._attach.prompt_length
        if recorder is None or not 0 < start < len(self._tokens):
            return
        tokens, attach = self._tokens, self._attach

        def recording() -> Recording:
            return Recording(
                tuple(tokens[:start]),
                tuple(tokens[start:]),
                attach.sampling.temperature,
                attach.sampling.seed,
                attach.target_fingerprint,
            )

        recorder.add(recording)
