"""One Verify stream: rounds in, emitted tokens out."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import grpc

from paceline.service import ServiceError
from paceline.v1 import verifier_pb2
from paceline.verifier.cache import Cache
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Round
from paceline.verifier.engine.output import StepOutput, merge
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.rpc.errors import as_service_errors, cache_not_found
from paceline.verifier.rpc.messages import read_tree, write_result
from paceline.verifier.store import CacheStore
from paceline.verifier.telemetry import Telemetry

Request = verifier_pb2.VerifyRequest


class VerifyStream:
    """Serves the rounds of one cache until its client ends the stream or a newer stream begins.

    A round is answered once it emitted a token; its answer is kept until the next round is
    answered. A round that failed before is not counted: its client repeats the round_id. If there
    is no memory for a round, the youngest generation is released.
    """

    def __init__(
        self,
        cache: Cache,
        store: CacheStore,
        engine: Engine,
        model: verifier_pb2.GetModelResponse,
        telemetry: Telemetry,
    ) -> None:
        self._cache = cache
        self._store = store
        self._engine = engine
        self._model = model
        self._telemetry = telemetry

    async def serve(self, first: Request, context: Any) -> None:
        """Answer ``first``, then the rounds that ``context`` receives.

        Raises:
            ServiceError: A round was invalid or failed, or a newer stream began (ABORTED).
        """
        cache, task = self._cache, asyncio.current_task()
        assert task is not None
        if isinstance(cache.stream, asyncio.Task):
            cache.stream.cancel()
        cache.stream = task
        try:
            request = first
            while request is not grpc.aio.EOF:
                await self._round(request, context)
                request = await context.read()
        except asyncio.CancelledError:
            if cache.stream is task:
                raise
            task.uncancel()
            raise ServiceError.aborted(
                "STREAM_SUPERSEDED", "a newer Verify stream of the same cache replaced this one"
            ) from None
        finally:
            if cache.stream is task:
                cache.stream = None

    async def _round(self, request: Request, context: Any) -> None:
        cache = self._cache
        if request.handle and request.handle != cache.handle:
            raise ServiceError.invalid_argument(
                "HANDLE_CHANGED", "a stream serves one cache; open another stream for another cache"
            )
        if cache.released:
            raise cache_not_found()
        self._store.renew(cache)
        if cache.busy:  # a round of a broken or superseded stream
            assert cache.job is not None
            await cache.job.finished()
        answered = cache.answered
        if answered is not None and request.round_id == answered.number:
            await context.write(self._response(answered, answered.outputs, last=True))
            return
        await self._answer(self._begin(request, answered), context)

    def _begin(self, request: Request, answered: Round | None) -> Round:
        """Check a new round and queue it."""
        expected = 1 if answered is None else answered.number + 1
        if request.round_id < expected:
            raise ServiceError.failed_precondition(
                "STALE_ROUND",
                f"round {request.round_id} was answered before, and only the newest answer is "
                f"kept; send round {expected}",
            )
        if request.round_id > expected:
            raise ServiceError.failed_precondition(
                "ROUND_GAP", f"the round_id is {request.round_id}, expected {expected}"
            )
        sequence = self._cache.sequence
        if sequence.finish is not None:
            raise ServiceError.failed_precondition(
                "FINISHED", "the generation has ended; release the cache"
            )
        sampling = sequence.generation.sampling
        tree = read_tree(request.tree, self._model, sampling, len(sequence.tokens))
        if len(tree) and request.free_run_steps > 1:
            raise ServiceError.invalid_argument(
                "BAD_ROUND", "a round has a tree or free_run_steps, not both"
            )
        deadline = perf_counter() + request.deadline_ms / 1e3 if request.deadline_ms else None
        round_ = Round(
            sequence,
            request.round_id,
            tree,
            steps=min(max(1, request.free_run_steps), sequence.room),
            deadline=deadline,
        )
        self._telemetry.report(self._cache, round_, request.traceparent)
        self._cache.job = round_
        self._engine.verify(round_)
        return round_

    async def _answer(self, round_: Round, context: Any) -> None:
        """Send the tokens of a round as they are emitted."""
        sent = 0
        done = False
        try:
            while not done:
                await round_.updated()
                done = round_.done  # read before the outputs: none is added after it
                outputs = round_.outputs[sent:]
                sent += len(outputs)
                if outputs:
                    last = done and round_.error is None
                    await context.write(self._response(round_, outputs, last=last))
        finally:
            round_.cancelled = True  # if the stream broke; no effect on a round that is done
        if round_.error is not None:
            if isinstance(round_.error, OutOfMemory):
                await self._store.make_room(round_.ready_at)
            with as_service_errors():
                raise round_.error

    def _response(
        self, round_: Round, outputs: list[StepOutput], *, last: bool
    ) -> verifier_pb2.VerifyResponse:
        output = merge(outputs)
        return verifier_pb2.VerifyResponse(
            round_id=round_.number,
            result=write_result(output),
            last=last,
            queue_us=output.queue_us,
            verify_us=output.step_us,
            node_budget=output.node_budget,
            checked_nodes=output.checked,
            batch_tokens=output.batch_tokens,
            generation=self._cache.generation,
        )
