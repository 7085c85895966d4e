"""The Draft stream."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from paceline.drafter.kv import KvExchange, KvGone
from paceline.drafter.methods.base import Budget, Drafter, Update
from paceline.drafter.recordings import Recorder
from paceline.drafter.registry import Registry, Version
from paceline.drafter.stream import Stream
from paceline.drafter.validation import check_attach, check_fit, check_length, check_tokens
from paceline.drafter.worker import Drafted, DraftWorker
from paceline.service import Gate, ServiceError
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

if TYPE_CHECKING:
    from paceline.drafter.telemetry import Telemetry

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves generations: attach, then a tree a round, until the stream ends in whatever way."""

    def __init__(
        self,
        registry: Registry,
        worker: DraftWorker,
        exchange: KvExchange,
        *,
        max_context: int,
        max_streams: int,
        telemetry: Telemetry | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.gate = Gate()
        """Streams in flight."""
        self._registry = registry
        self._worker = worker
        self._exchange = exchange
        self._max_context = max_context
        self._max_streams = max_streams
        self._telemetry = telemetry
        self._recorder = recorder

    async def Draft(
        self,
        request_iterator: AsyncIterator[drafter_pb2.DraftRequest],
        context: Context,
    ) -> None:
        """One generation. Reads and writes by itself: a round has no time for more layers."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        with self.gate.enter():
            if self.gate.inside > self._max_streams:
                raise ServiceError.resource_exhausted(
                    "TOO_MANY_STREAMS",
                    f"this drafter serves {self._max_streams} generations at once; go on without "
                    "and try later",
                    retry_after=1.0,
                )
            await self._generation(first, context)

    async def _generation(self, first: drafter_pb2.DraftRequest, context: Context) -> None:
        if first.WhichOneof("event") != "attach":
            raise ServiceError.invalid_argument(
                "NOT_ATTACHED", "the first message of a Draft stream must be an attach"
            )
        attach = first.attach
        check_attach(attach, self._max_context)
        version = self._registry.choose(attach.drafter, attach.version)
        check_fit(attach, version.drafter, version.spec.name)
        stream = Stream(
            attach, version, self._registry, self._worker, self._exchange, self._telemetry
        )
        try:
            check_tokens("tokens", stream.tokens, stream.vocab_size)
            await stream.open()
            await context.write(_attached(version, stream.kv_transport))
            await stream.warm()
            try:
                await self._rounds(stream, context)
            finally:
                if self._recorder is not None and stream.went_on:
                    self._recorder.add(stream.recording)
        except KvGone as error:
            raise ServiceError.unavailable(
                "KV_GONE", f"{error}; attach again with the read grant of the cache in use"
            ) from error
        except asyncio.CancelledError:
            stream.raise_if_evicted()
            raise
        finally:
            stream.close()

    async def _rounds(self, stream: Stream, context: Context) -> None:
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:
                return
            arrived = time.monotonic()
            asked = request.round
            if request.WhichOneof("event") != "round":
                raise ServiceError.invalid_argument(
                    "ALREADY_ATTACHED", "after the attach every message must be a round"
                )
            await stream.follow()
            check_tokens("new_tokens", asked.new_tokens, stream.vocab_size)
            length = len(stream.tokens) + len(asked.new_tokens)
            if asked.total_length != length:
                raise ServiceError.failed_precondition(
                    "OUT_OF_STEP",
                    f"with these new tokens the text has {length} tokens here, but total_length is "
                    f"{asked.total_length}; attach again with all tokens",
                )
            check_length(length, self._max_context)
            update = Update(tuple(asked.new_tokens), asked.committed_length)
            drafted = await stream.round(update, _budget(asked, stream.version.drafter, arrived))
            await context.write(_answer(asked.round_id, drafted, stream))
            if self._telemetry is not None:
                self._telemetry.drafted(stream.version, drafted, asked.traceparent, arrived)


def _attached(version: Version, kv_transport: str) -> drafter_pb2.DraftResponse:
    needs = version.drafter.needs
    return drafter_pb2.DraftResponse(
        attached=drafter_pb2.DraftAttached(
            drafter=version.spec.name,
            version=version.version,
            method=version.spec.method,
            hidden_state_layers=needs.hidden_state_layers,
            hidden_state_window=needs.hidden_state_window,
            max_nodes=version.drafter.max_nodes,
            kv_transport=kv_transport,
        )
    )


def _budget(asked: drafter_pb2.DraftRound, drafter: Drafter, arrived: float) -> Budget:
    return Budget(
        nodes=min(asked.node_budget, drafter.max_nodes),
        depth=min(asked.max_depth or drafter.max_depth, drafter.max_depth),
        deadline=arrived + asked.deadline_ms / 1000 if asked.deadline_ms else math.inf,
    )


def _answer(round_id: int, drafted: Drafted, stream: Stream) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(
        tree=drafter_pb2.DraftTree(
            round_id=round_id,
            tree=drafted.tree.to_proto(),
            draft_us=round(drafted.draft_seconds * 1e6),
            queue_us=round(drafted.queue_seconds * 1e6),
            version=stream.version.version,
            kv_bytes=stream.new_kv_bytes(),
        )
    )
