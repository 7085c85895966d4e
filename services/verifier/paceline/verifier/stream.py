"""One Verify stream: rounds in, emitted tokens out."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any

import grpc

from paceline.service import ServiceError
from paceline.v1 import verifier_pb2
from paceline.verifier.cache import Cache
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Round
from paceline.verifier.engine.output import StepOutput, merge
from paceline.verifier.failures import as_service_errors, cache_not_found
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.messages import Limits, read_tree, write_result
from paceline.verifier.store import CacheStore

if TYPE_CHECKING:
    from paceline.verifier.telemetry import Telemetry

Request = verifier_pb2.VerifyRequest


class VerifyStream:
    """Serves the rounds of one cache until its client ends the stream, or a newer one takes over.

    A round counts as answered once it emitted a token; its whole answer is then kept until the
    next round is answered. A round that was refused or failed before that is not counted: its
    round_id comes again. A cache that shared memory has no room for is released, unless it is the
    oldest: its client makes it anew when there is room.
    """

    def __init__(
        self,
        cache: Cache,
        store: CacheStore,
        engine: Engine,
        limits: Limits,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._cache = cache
        self._store = store
        self._engine = engine
        self._limits = limits
        self._telemetry = telemetry

    async def serve(self, first: Request, context: Any) -> None:
        """Answer rounds: ``first``, then those that ``context`` still brings.

        Raises:
            ServiceError: A round was wrong, could not be computed, or the stream was superseded
                (ABORTED).
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
                "STREAM_SUPERSEDED", "another Verify stream of the same cache took over"
            ) from None
        finally:
            if cache.stream is task:
                cache.stream = None

    async def _round(self, request: Request, context: Any) -> None:
        cache = self._cache
        if request.handle and request.handle != cache.handle:
            raise ServiceError.invalid_argument(
                "HANDLE_CHANGED", "a stream serves one cache; open another stream for another one"
            )
        if cache.released:
            raise cache_not_found()
        self._store.renew(cache)
        if cache.busy:  # what a broken or superseded stream left behind
            assert cache.job is not None
            await cache.job.finished()
        answered = cache.answered
        if answered is not None and request.round_id == answered.number:
            await context.write(self._response(answered, answered.outputs, last=True))
            return
        await self._answer(self._begin(request, answered), context)

    def _begin(self, request: Request, answered: Round | None) -> Round:
        """Check a new round and hand it to the engine."""
        expected = 1 if answered is None else answered.number + 1
        if request.round_id < expected:
            raise ServiceError.failed_precondition(
                "STALE_ROUND",
                f"round {request.round_id} was answered before, and only the newest answer is "
                f"kept; round {expected} is next",
            )
        if request.round_id > expected:
            raise ServiceError.failed_precondition(
                "ROUND_GAP", f"round {request.round_id} came, but round {expected} is next"
            )
        sequence = self._cache.sequence
        if sequence.finish is not None:
            raise ServiceError.failed_precondition(
                "FINISHED", "the generation has ended; release the cache"
            )
        sampling = sequence.generation.sampling
        tree = read_tree(request.tree, self._limits, sampling, len(sequence.tokens))
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
        if self._telemetry is not None:
            self._telemetry.watch(self._cache, round_, request.traceparent)
        self._cache.job = round_
        self._engine.verify(round_)
        return round_

    async def _answer(self, round_: Round, context: Any) -> None:
        """Send what a round emits, as it comes."""
        sent = 0
        done = False
        try:
            while not done:
                await round_.updated()
                done = round_.done  # before the outputs: none comes after it
                fresh = round_.outputs[sent:]
                sent += len(fresh)
                if fresh:
                    last = done and round_.error is None
                    await context.write(self._response(round_, fresh, last=last))
        finally:
            round_.cancelled = True  # if the stream broke; means nothing to a round that is done
        if round_.error is not None:
            if isinstance(round_.error, OutOfMemory) and self._store.gives_way(self._cache):
                await self._store.release(self._cache, "gave_way")
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
