"""The verifier's RPCs."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import Any

import grpc

from paceline.service import Gate, ServiceError, limits, owner_of, user_of
from paceline.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import Decode, Prefill
from paceline.verifier.engine.report import (
    LOCAL,
    NONE,
    StepOutput,
    StepReport,
    merge,
    mergeable,
    microseconds,
    shares,
)
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.model import ModelInfo
from paceline.verifier.rpc.exchange import DraftExchangeServicer
from paceline.verifier.rpc.kv_exchange import score_prompt
from paceline.verifier.rpc.messages import (
    as_service_errors,
    cache_not_found,
    check_drafter,
    read_request,
    write_result,
    write_top,
)
from paceline.verifier.rpc.streams import first_message, write
from paceline.verifier.store import CAPABILITY_BYTES, Cache, CacheNotFound, CacheStore
from paceline.verifier.telemetry import Telemetry

_MAX_CREDITS = (1 << 31) - 1


class GenerateCall:
    """Serves one generation until it ends, its client ends the stream, or a newer one begins.

    The engine runs the steps as one job, which ends with the stream. A later stream sends the
    tokens again that its client lacks, and goes on with a new job. If there is no memory for a
    step, the youngest generation is released.
    """

    def __init__(
        self, cache: Cache, store: CacheStore, engine: Engine, telemetry: Telemetry
    ) -> None:
        self._cache = cache
        self._store = store
        self._engine = engine
        self._telemetry = telemetry

    async def serve(self, first: verifier_pb2.GenerateRequest, context: Any) -> None:
        """Serve the stream whose first message is ``first``. Raises ``ServiceError`` if a message
        was invalid, a step failed, or a newer stream began (ABORTED)."""
        cache, task = self._cache, asyncio.current_task()
        assert task is not None
        if isinstance(cache.stream, asyncio.Task):
            cache.stream.cancel()
        cache.stream = task
        try:
            await self._serve(first, context)
        except asyncio.CancelledError:
            if cache.stream is task:
                raise
            task.uncancel()
            raise ServiceError.aborted(
                "STREAM_SUPERSEDED", "a newer Generate stream of the same cache replaced this one"
            ) from None
        finally:
            if cache.stream is task:
                cache.stream = None
            if not cache.released:
                self._store.renew(cache)

    async def _serve(self, first: verifier_pb2.GenerateRequest, context: Any) -> None:
        cache, start = self._cache, first.start
        if cache.busy:  # the job of a broken or superseded stream
            assert isinstance(cache.job, Decode), "a handle is known after its prefill"
            self._engine.cancel(cache.job)
            await cache.job.finished()
        if cache.released:
            raise cache_not_found()
        _check(start, cache)
        if start.position < cache.sequence.text.output_length:
            await write(context, _message(self._again(start.position)))
        if cache.sequence.finish is not None:
            return
        job = Decode(
            cache.sequence,
            drafter=None if start.drafter == NONE else start.drafter,
            always_draft=start.always_draft,
            max_nodes=start.max_nodes,
            timeout=start.draft_timeout_ms / 1e3 or None,
            isolated=start.isolated,
            credits=min(first.credits, _MAX_CREDITS),
            trace=self._telemetry.traced_rounds(start.traceparent),
        )
        cache.job = job
        self._engine.decode(job)
        reading = asyncio.create_task(self._read_credits(job, context))
        try:
            await self._answer(job, context)
        finally:
            reading.cancel()
            self._engine.cancel(job)  # no effect on a job that is done
        if reading.done() and not reading.cancelled():
            reading.result()  # raises what was wrong with a message of the client
        if isinstance(job.error, OutOfMemory):
            await self._store.make_room(job.ready_at)
        with as_service_errors():
            job.raise_error()
        if cache.released and cache.sequence.finish is None:  # while its last step ran
            raise cache_not_found()

    async def _read_credits(self, job: Decode, context: Any) -> None:
        """Pass on credits until the client ends its side of the stream. A message that is wrong
        ends the job. Raises ``ServiceError`` if it is."""
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                self._engine.grant(job, min(request.credits, _MAX_CREDITS))
        except ServiceError:
            self._engine.cancel(job)
            raise

    async def _answer(self, job: Decode, context: Any) -> None:
        """Send the tokens of a job as they are emitted."""
        done = False
        while not done:
            await job.updated()
            done = job.done  # read before the outputs: none is added after it
            reports: list[StepReport] = []
            while job.reports:
                merged = [job.reports.popleft()]
                while job.reports and mergeable(merged[-1], job.reports[0]):
                    merged.append(job.reports.popleft())
                reports.append(merge(merged))
            if not reports:
                continue
            try:
                await write(context, _message(*map(self._round, reports)))
            finally:  # a client that has the last token cancels the stream meanwhile
                for report in reports:
                    self._telemetry.answered(self._cache, report, job.trace)

    def _round(self, report: StepReport) -> verifier_pb2.Round:
        response = verifier_pb2.Round(
            position=report.position,
            result=write_result(report.output, report.committed, report.accepted),
            steps=report.steps,
            checked_nodes=report.output.checked,
            no_draft=report.no_draft and f"NO_DRAFT_REASON_{report.no_draft.name}",
            round_us=microseconds(report.ended - report.round_began),
            verify_us=report.step_us,
            queue_us=report.queue_us,
            plain_us=report.plain_us,
            node_budget=report.node_budget,
            batch_tokens=report.batch_tokens,
            epoch=self._cache.epoch,
            fallbacks=[reason for reason, _ in report.fallbacks],
        )
        if report.fallbacks:
            response.fallback_message = report.fallbacks[-1][1]
        if report.drafter is not None:
            response.drafter = str(report.drafter)
        draft = report.draft
        if draft is not None:
            response.tree.tokens.extend(draft.tree.tokens)
            response.tree.parents.extend(draft.tree.parents)
            if draft.tree.sources:
                for share in shares(report):
                    response.sources.append(verifier_pb2.SourceShare(**share._asdict()))
            response.draft_us = draft.draft_us
            response.queue_us += draft.queue_us
            response.kv_bytes = draft.kv_bytes
        return response

    def _again(self, position: int) -> verifier_pb2.Round:
        """Tokens from a position on, which were emitted for an earlier stream."""
        sequence = self._cache.sequence
        text = sequence.text
        skipped = position - (text.given - text.prompt_length)
        output = StepOutput(
            list(text.tokens[text.prompt_length + position :]),
            finish=sequence.finish,
            logprobs=sequence.logprobs[skipped:],
            top_logprobs=sequence.top_logprobs[skipped:],
        )
        return self._round(StepReport(output, position, sequence.committed, steps=0))


def _message(*rounds: verifier_pb2.Round) -> verifier_pb2.GenerateResponse:
    return verifier_pb2.GenerateResponse(rounds=rounds)


def _check(start: verifier_pb2.GenerateStart, cache: Cache) -> None:
    """Check the first message against the cache. Raises ``ServiceError``: INVALID_ARGUMENT or
    FAILED_PRECONDITION."""
    check_drafter(start.drafter)
    sequence = cache.sequence
    first, emitted = (
        (sequence.text.given - sequence.text.prompt_length),
        sequence.text.output_length,
    )
    if not first <= start.position <= emitted:
        raise ServiceError.failed_precondition(
            "POSITION_AHEAD" if start.position > emitted else "POSITION_LOST",
            f"position is {start.position}, but this cache has the output tokens from {first} to "
            f"{emitted}; create a cache with the prompt and the tokens received so far",
        )


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The VerifierService of the protocol."""

    def __init__(
        self,
        model: ModelInfo,
        store: CacheStore,
        engine: Engine,
        gate: Gate,
        exchange: DraftExchangeServicer,
        telemetry: Telemetry,
    ) -> None:
        self._model = model
        self._store = store
        self._engine = engine
        self._gate = gate
        self._exchange = exchange
        self._telemetry = telemetry
        self._grammars = model.grammars()
        Thread(target=self._grammars.prepare, name="grammars", daemon=True).start()

    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Any
    ) -> verifier_pb2.GetModelResponse:
        """Describe the served model, and how busy the verifier is."""
        response = self._model.response(request)
        response.draining = self._gate.closed
        response.generations = self._store.unfinished
        response.drafter_services.extend(self._exchange.joined())
        return response

    async def CreateCache(self, request: verifier_pb2.CreateCacheRequest, context: Any) -> None:
        """Prefill a prompt; stream progress, then the capabilities and the first token."""
        with self._gate.enter(), as_service_errors():
            drafter = None if request.drafter in (NONE, LOCAL.name) else request.drafter
            taps = self._exchange.taps(drafter)
            model = self._model.message
            owner = owner_of(context)
            user = user_of(owner, request.user)
            asked = await read_request(request, user, model, self._grammars, taps)
            parent = None
            if request.parent_handle:
                parent = self._find(request.parent_handle, owner).sequence
            cache = await self._store.admit(asked, owner)
            del asked  # the sequence frees its grammar; gRPC may keep this frame
            score_prompt(cache, self._exchange.scored(drafter))
            self._telemetry.admitted(cache)
            try:
                prefill = Prefill(cache.sequence)
                self._telemetry.report_prefill(cache, prefill, request.traceparent)
                cache.job = prefill
                self._engine.prefill(prefill, parent)
                await self._send_progress(prefill, context)
                await write(context, self._created(cache, prefill))
            except BaseException as error:  # cancelled too: the client has no handle
                await self._store.release(cache, type(error).__name__)
                raise
            self._store.renew(cache, self._unused_seconds)

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        """Run the rounds of one cache and stream its tokens."""
        # Reads from the context, since the iterator of requests adds latency.
        first = await first_message(context)
        if first is grpc.aio.EOF:
            return
        cache = self._find(first.start.handle, owner_of(context))
        stream = GenerateCall(cache, self._store, self._engine, self._telemetry)
        await stream.serve(first, context)

    async def RenewLease(
        self, request: verifier_pb2.RenewLeaseRequest, context: Any
    ) -> verifier_pb2.RenewLeaseResponse:
        """Renew the lease of a cache."""
        cache = self._find(request.handle, owner_of(context))
        return verifier_pb2.RenewLeaseResponse(
            lease_ms=self._model.message.lease_ms, epoch=cache.epoch
        )

    async def ReleaseCache(
        self, request: verifier_pb2.ReleaseCacheRequest, context: Any
    ) -> verifier_pb2.ReleaseCacheResponse:
        """Free a cache; returns when its memory is free."""
        try:
            cache = self._store.find(_checked(request.handle), owner_of(context))
        except CacheNotFound:
            return verifier_pb2.ReleaseCacheResponse(released=False)
        await self._store.release(cache)
        return verifier_pb2.ReleaseCacheResponse(released=True)

    @property
    def _unused_seconds(self) -> float:
        """The lease of a cache until it is used. If its client has left while it was made, the
        verifier may not hear of it."""
        return min(self._store.lease_seconds, limits.UNUSED_SECONDS)

    def _find(self, handle: bytes, owner: str) -> Cache:
        with as_service_errors():
            return self._store.find(_checked(handle), owner)

    async def _send_progress(self, prefill: Prefill, context: Any) -> None:
        while not prefill.done:
            await prefill.updated()
            if not prefill.done:
                progress = verifier_pb2.PrefillProgress(
                    prefilled_tokens=prefill.sequence.committed,
                    total_tokens=prefill.sequence.text.given,
                )
                await write(context, verifier_pb2.CreateCacheResponse(progress=progress))
        prefill.raise_error()

    def _created(self, cache: Cache, prefill: Prefill) -> verifier_pb2.CreateCacheResponse:
        assert prefill.output is not None, "a prefill without an error has a first token"
        created = verifier_pb2.CacheCreated(
            handle=cache.handle,
            read_grant=cache.read_grant,
            first=write_result(prefill.output, cache.sequence.committed),
            reused_tokens=prefill.reused,
            epoch=cache.epoch,
            lease_ms=round(self._unused_seconds * 1000),
            queue_us=prefill.queue_us,
            prefill_us=prefill.step_us,
            prompt_logprobs=[logprob for logprob, _ in prefill.prompt_logprobs],
        )
        if cache.sequence.request.prompt_logprobs:
            created.top_prompt_logprobs.extend(write_top(top) for _, top in prefill.prompt_logprobs)
        return verifier_pb2.CreateCacheResponse(created=created)


def _checked(handle: bytes) -> bytes:
    if len(handle) != CAPABILITY_BYTES:
        raise ServiceError.invalid_argument(
            "BAD_HANDLE",
            f"the handle has {len(handle)} bytes, expected {CAPABILITY_BYTES}; send the one that "
            "CreateCache returned",
        )
    return handle
