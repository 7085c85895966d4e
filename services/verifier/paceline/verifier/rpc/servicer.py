"""The verifier's RPCs, and the checks of their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import grpc

from paceline.checks import ParameterError
from paceline.kernels import SamplingRules
from paceline.sampling import CONSTRAINTS, Sampling
from paceline.service import Gate, ServiceError, limits, owner_of, user_of
from paceline.service.tasks import in_thread
from paceline.text import Text, sampling_rules
from paceline.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from paceline.verifier.engine.engine import Engine
from paceline.verifier.engine.job import (
    ConstraintFailed,
    Decode,
    Prefill,
    Request,
    SequenceClosed,
    StepFailed,
)
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
from paceline.verifier.grammar import Grammar, GrammarError, Grammars, GrammarsBusy, Kind
from paceline.verifier.kv.base import OutOfMemory, Taps
from paceline.verifier.model import ModelInfo
from paceline.verifier.rpc.exchange import DraftExchangeServicer
from paceline.verifier.rpc.kv_exchange import score_prompt
from paceline.verifier.rpc.streams import first_message, write
from paceline.verifier.store import CAPABILITY_BYTES, Cache, CacheNotFound, CacheStore, StoreFull
from paceline.verifier.telemetry import Telemetry

_MAX_CREDITS = (1 << 31) - 1
# Delay that clients are advised to wait for KV memory. Generations take seconds.
_RETRY_SECONDS = 0.5

Model = verifier_pb2.GetModelResponse  # description of the served model

_invalid = ServiceError.invalid_argument


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
            raise _cache_not_found()
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
        with _as_service_errors():
            job.raise_error()
        if cache.released and cache.sequence.finish is None:  # while its last step ran
            raise _cache_not_found()

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
            result=_write_result(report.output, report.committed, report.accepted),
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
        """Return tokens from a position on, which were emitted for an earlier stream."""
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
    _check_drafter(start.drafter)
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
        with self._gate.enter(), _as_service_errors():
            drafter = None if request.drafter in (NONE, LOCAL.name) else request.drafter
            taps = self._exchange.taps(drafter)
            model = self._model.message
            owner = owner_of(context)
            user = user_of(owner, request.user)
            asked = await _read_request(request, user, model, self._grammars, taps)
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
        with _as_service_errors():
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
            first=_write_result(prefill.output, cache.sequence.committed),
            reused_tokens=prefill.reused,
            epoch=cache.epoch,
            lease_ms=round(self._unused_seconds * 1000),
            queue_us=prefill.queue_us,
            prefill_us=prefill.step_us,
            prompt_logprobs=[logprob for logprob, _ in prefill.prompt_logprobs],
        )
        if cache.sequence.request.prompt_logprobs:
            created.top_prompt_logprobs.extend(
                _write_top(top) for _, top in prefill.prompt_logprobs
            )
        return verifier_pb2.CreateCacheResponse(created=created)


def _checked(handle: bytes) -> bytes:
    if len(handle) != CAPABILITY_BYTES:
        raise ServiceError.invalid_argument(
            "BAD_HANDLE",
            f"the handle has {len(handle)} bytes, expected {CAPABILITY_BYTES}; send the one that "
            "CreateCache returned",
        )
    return handle


@contextmanager
def _as_service_errors() -> Iterator[None]:
    """Convert exceptions of the store and the engine to errors of an RPC."""
    try:
        yield
    except (CacheNotFound, SequenceClosed) as error:
        raise _cache_not_found() from error
    except StoreFull as error:
        retry = None if error.forever else _RETRY_SECONDS
        raise ServiceError.resource_exhausted("KV_FULL", str(error), retry) from error
    except OutOfMemory as error:
        raise ServiceError.resource_exhausted("KV_FULL", str(error), _RETRY_SECONDS) from error
    except ConstraintFailed as error:
        raise _invalid("INVALID_SCHEMA", str(error)) from error
    except StepFailed as error:
        raise ServiceError.internal("STEP_FAILED", str(error)) from error


def _cache_not_found() -> ServiceError:
    """Return the same error for unknown, expired and released handles, and other clients'."""
    return ServiceError.not_found(
        "CACHE_NOT_FOUND",
        "you have no cache with this handle: it was released, its lease expired, or the verifier "
        "was restarted; create one with the prompt and the tokens emitted so far",
    )


async def _read_request(
    request: verifier_pb2.CreateCacheRequest,
    owner: str,
    model: Model,
    grammars: Grammars,
    taps: Taps | None,
) -> Request:
    """Read and check the request of an owner's text; ``taps`` are the hidden states that its
    drafter reads. Raises ``ServiceError``: INVALID_ARGUMENT."""
    prompt, output = request.prompt_tokens, request.output_tokens
    if not prompt:
        raise _invalid("PROMPT_EMPTY", "the prompt has no token; send at least one")
    length = len(prompt) + len(output)
    if length >= model.max_context:
        raise _invalid(
            "PROMPT_TOO_LONG",
            f"prompt and output so far have {length} tokens, expected fewer than the context of "
            f"{model.max_context}; shorten the prompt",
        )
    limit = model.max_context
    if request.max_new_tokens:
        limit = min(limit, len(prompt) + request.max_new_tokens)
    if length >= limit:
        raise _invalid(
            "NOTHING_LEFT",
            f"max_new_tokens is {request.max_new_tokens}, but {len(output)} tokens were emitted "
            "already; raise it or stop here",
        )
    _check_tokens("prompt_tokens", prompt, model)
    _check_tokens("output_tokens", output, model)
    if len(request.stop_token_ids) > limits.STOP_TOKENS:
        raise _invalid(
            "TOO_MANY_STOP_TOKENS",
            f"there are {len(request.stop_token_ids)} stop tokens, expected at most "
            f"{limits.STOP_TOKENS}",
        )
    _check_tokens("stop_token_ids", request.stop_token_ids, model)
    for name in ("top_logprobs", "prompt_logprobs"):
        if (count := getattr(request, name)) > limits.TOP_LOGPROBS:
            raise _invalid(
                "BAD_TOP_LOGPROBS", f"{name} is {count}, expected at most {limits.TOP_LOGPROBS}"
            )
    _check_drafter(request.drafter)
    if len(request.user) > limits.NAME_CHARS:
        raise _invalid(
            "BAD_USER",
            f"the user's name has {len(request.user)} characters, expected at most "
            f"{limits.NAME_CHARS}; send a digest of it",
        )
    stop_ids = set(request.stop_token_ids)
    if not request.ignore_eos:
        stop_ids.update(model.eos_token_ids)
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)  # a part would keep the whole message
    logprobs = request.logprobs or request.top_logprobs > 0
    text = Text(
        prompt,
        output,
        limit=limit,
        sampling=_read_sampling(request.sampling, model),
        stop_ids=frozenset(stop_ids),
        owner=owner,
        message=sampling,
    )
    return Request(
        text,
        top_logprobs=request.top_logprobs if logprobs else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        taps=taps,
        grammar=await _read_grammar(request.sampling, tuple(output), grammars),
    )


def _check_drafter(name: str) -> None:
    """Check the length of a drafter's name. Raises ``ServiceError``: INVALID_ARGUMENT."""
    if len(name) > limits.NAME_CHARS:
        raise _invalid(
            "BAD_DRAFTER",
            f"the drafter's name has {len(name)} characters, expected at most {limits.NAME_CHARS}; "
            "shorten it or leave it out",
        )


def _read_sampling(message: sampling_pb2.SamplingParams, model: Model) -> SamplingRules:
    """Read and check sampling parameters. Raises ``ServiceError``: INVALID_ARGUMENT."""
    try:
        params = sampling_rules(Sampling.from_proto(message))
    except ParameterError as error:
        reason = "INVALID_SCHEMA" if error.parameter in CONSTRAINTS else "INVALID_SAMPLING"
        raise _invalid(reason, str(error)) from error
    _check_tokens("logit_bias", list(message.logit_bias), model)
    return params


def _write_result(
    output: StepOutput, committed: int, accepted: Sequence[int] = ()
) -> verifier_pb2.RoundResult:
    """Return the message of an output after which so many tokens are committed. ``accepted`` are
    the accepted nodes of the drafted tree."""
    result = verifier_pb2.RoundResult(
        tokens=output.tokens,
        accepted_nodes=accepted,
        logprobs=output.logprobs,
        finish_reason=output.finish and f"FINISH_REASON_{output.finish.name}",
        committed_length=committed,
    )
    result.top_logprobs.extend(map(_write_top, output.top_logprobs))
    return result


def _write_top(top: Sequence[tuple[int, float]]) -> verifier_pb2.TopLogprobs:
    """Return the message of the likeliest tokens at one position."""
    return verifier_pb2.TopLogprobs(
        tokens=[token for token, _ in top], logprobs=[value for _, value in top]
    )


async def _read_grammar(
    message: sampling_pb2.SamplingParams, output: tuple[int, ...], grammars: Grammars
) -> Grammar | None:
    sources: dict[Kind, str] = {
        "json_schema": message.json_schema,
        "regex": message.regex,
        "grammar": message.grammar,
    }
    given = [(kind, source) for kind, source in sources.items() if source]
    if not given:
        return None
    ((kind, source),) = given
    try:
        grammar = await grammars.compile(kind, source)
        if output:
            return await in_thread(partial(grammar.after, output))
    except GrammarError as error:
        raise _invalid("INVALID_SCHEMA", str(error)) from error
    except GrammarsBusy as error:
        raise ServiceError.resource_exhausted(
            "TOO_MANY_CONSTRAINTS", f"{error}; try again later", _RETRY_SECONDS
        ) from error
    return grammar


def _check_tokens(name: str, tokens: Sequence[int], model: Model) -> None:
    if len(tokens) and max(tokens) >= model.vocab_size:
        raise _invalid(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{name} has token {max(tokens)}, but the model has {model.vocab_size} token ids, "
            "counted from 0; does the text come from another tokenizer?",
        )
