"""A generation: awaitable, iterable, cancellable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from paceline.telemetry.names import Span
from paceline.v1 import verifier_pb2

from ._errors import ClientClosedError, DeadlineError, InvalidRequestError, PacelineError
from ._fleet import Fleet
from ._options import DraftOptions, GenerationOptions
from ._receipt import Receipt
from ._stats import GenerationTrace, RoundStats, Stats, Usage
from ._stream import UNLIMITED, StreamRequest, TokenStream, cost
from ._text import Chunk, EmittedText, FinishReason, Model, TokenLogprob
from ._transport import Connections

_CLOSE_TIMEOUT = 5.0  # longest wait for the release of caches when the client closes, in seconds


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation."""

    text: str
    """Text of the emitted tokens, up to a stop string; empty without a tokenizer."""
    token_ids: list[int]
    """Emitted tokens, the one that ended the generation included."""
    logprobs: list[TokenLogprob] | None
    """One per token, if requested."""
    prompt_logprobs: list[TokenLogprob] | None
    """One per prompt token but the first, if requested."""
    finish_reason: FinishReason
    """"stop": end of sequence, stop token or stop string. "length": max_new_tokens, or the
    context is full. "cancelled": `Generation.cancel` was called."""
    stop_string: str | None
    """The stop string that ended the text, if one did."""
    usage: Usage
    stats: Stats
    seed: int
    """Seed of the sampling noise: the same call with this seed returns the same tokens."""
    receipt: Receipt | None
    """By which anybody can check the tokens. None without any, and of rejection sampling, where
    they depend on the drafter."""

    def __repr__(self) -> str:
        usage = self.usage
        return (
            f"<GenerationResult {_shortened(self.text)}: {usage.completion_tokens} tokens after "
            f"{usage.prompt_tokens}, finish_reason={self.finish_reason!r}, seed={self.seed}>"
        )


class Generation:
    """A generation request. Await it for the whole result, or iterate over its chunks.

    It starts with the first await or iteration. Leaving an `async for` early, cancelling the
    waiting task, `cancel` and `aclose` stop it and release its cache at once.
    """

    def __init__(
        self,
        state: ClientState,
        prompt: str | list[int] | Callable[[Model], Awaitable[list[int]]],
        options: GenerationOptions,
    ) -> None:
        self._state = state
        self._prompt = prompt
        self._options = options
        self._window = state.unread_chunks
        self._chunks: asyncio.Queue[tuple[Chunk, int] | None] = asyncio.Queue()
        self._reading = False
        self._task: asyncio.Task[GenerationResult] | None = None
        self._cancellable = False
        self._iterated = False
        self._stopped_by: Exception | None = None
        self._prompt_tokens: list[int] = []
        self._output = EmittedText(None, ())
        self._reused = 0
        self._stream: TokenStream | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._trace: GenerationTrace | None = None
        self.stats = Stats()
        """Updated while the generation runs."""
        self.operation: str = Span.GENERATION
        """Its name in traces, as of its start: "text_completion", or "chat" for an answer in a
        conversation."""

    def __repr__(self) -> str:
        state = "not started" if self._task is None else "done" if self._task.done() else "running"
        tokens = len(self._output.token_ids)
        return f"<Generation {state}, {tokens} tokens: {_shortened(self._output.text)}>"

    @property
    def handle(self) -> bytes:
        """Handle of the cache, to be the `parent` of another generation; empty without a cache."""
        return self._stream.handle if self._stream is not None else b""

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the prompt tokens but the first, once known, if requested."""
        return self._stream.prompt_logprobs if self._stream is not None else []

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._result().__await__()

    def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        if self._task is not None or self._iterated:
            raise RuntimeError("the generation has started: iterate before awaiting, and only once")
        self._iterated = True
        return self._read()

    def cancel(self) -> None:
        """Stop the generation. Awaiting it returns the text so far, as "cancelled"."""
        self._stop(_Cancelled())

    def fail(self, message: str) -> None:
        """Stop the generation. Awaiting it raises ClientClosedError."""
        self._stop(ClientClosedError(message))

    async def aclose(self) -> None:
        """Stop the generation and wait until its cache, kept or not, is released."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # marks it as retrieved
        if self._releasing is not None:
            if self in self._state.kept:
                self._releasing.cancel()
            await asyncio.wait([self._releasing])

    def _stop(self, reason: Exception) -> None:
        self._stopped_by = self._stopped_by or reason
        if self._cancellable and self._task is not None:
            self._cancellable = False
            self._task.cancel()

    def _start(self, *, reading: bool) -> asyncio.Task[GenerationResult]:
        if self._task is None:
            self._reading = reading
            self._task = asyncio.create_task(self._run())
        return self._task

    async def _result(self) -> GenerationResult:
        task, self._window = self._start(reading=False), UNLIMITED
        if self._stream is not None:
            await self._stream.remove_limit()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _read(self) -> AsyncGenerator[Chunk, None]:
        task = self._start(reading=True)
        try:
            while (item := await self._chunks.get()) is not None:
                chunk, steps = item
                if self._stream is not None:
                    await self._stream.taken(steps)
                yield chunk
            await asyncio.shield(task)
        finally:
            if not task.done():
                await self.aclose()

    async def _run(self) -> GenerationResult:
        """Return the generation's task. The result does not wait for the release of the cache."""
        began = perf_counter()
        self._state.generations.add(self)
        self._trace = GenerationTrace.start(self._options, self.operation)
        error: BaseException | None = None
        try:
            await self._generate()
        except BaseException as raised:
            error = raised
            if isinstance(raised, PacelineError):
                raised.text, raised.token_ids = self._output.text, self._output.token_ids
            raise
        finally:
            self._cancellable = False
            self._chunks.put_nowait(None)
            self._clean_up()
            await asyncio.sleep(0)  # the release begins while its trace is open
            self.stats.total_ms = (perf_counter() - began) * 1000
            self._state.generations.discard(self)
            if self._trace is not None:
                reason = self._output.finish_reason
                self._trace.finish(self._usage(), self.stats, reason, error)
        output = self._output
        assert output.finish_reason, "no error was raised"
        return GenerationResult(
            text=output.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs if self._options.logprobs is not False else None,
            prompt_logprobs=self.prompt_logprobs
            if self._options.prompt_logprobs is not None
            else None,
            finish_reason=output.finish_reason,
            stop_string=output.stop_string,
            usage=self._usage(),
            stats=self.stats,
            seed=self._options.key,
            receipt=self._receipt(),
        )

    def _receipt(self) -> Receipt | None:
        options, output, stream = self._options, self._output, self._stream
        if stream is None or not output.token_ids or options.rejects:
            return None
        return Receipt.of(
            stream.facts,
            stream.numerics,
            self._prompt_tokens,
            options,
            output.token_ids,
            output.finish_reason,
            options.drafter != "none",
        )

    def _usage(self) -> Usage:
        return Usage(len(self._prompt_tokens), len(self._output.token_ids), self._reused)

    async def _generate(self) -> None:
        """Run to the end of the text, the deadline or `cancel`, whichever comes first."""
        deadline = self._options.deadline
        self._cancellable = True
        timeout = asyncio.timeout(deadline)
        try:
            async with timeout:
                if self._stopped_by is not None:
                    raise asyncio.CancelledError
                self._state.check_open()
                model = await self._state.fleet.model()
                if self._trace is not None:
                    self._trace.served_by(model.facts.name)
                await self._prepare(model)
                await self._receive(model)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineError(
                f"the deadline of {deadline} s passed after {len(self._output.token_ids)} tokens: "
                "allow more time or ask for fewer tokens"
            ) from None
        except asyncio.CancelledError:
            if self._stopped_by is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            if not isinstance(self._stopped_by, _Cancelled):
                raise self._stopped_by from None
            self._output.finish_reason = "cancelled"

    async def _prepare(self, model: Model) -> None:
        if isinstance(self._prompt, str):
            self._prompt_tokens = await model.encode(self._prompt)
        elif callable(self._prompt):
            self._prompt_tokens = await self._prompt(model)
        else:
            self._prompt_tokens = self._prompt
        if not self._prompt_tokens:
            raise InvalidRequestError(
                "the prompt is empty: give a text with at least one token",
                metadata={"param": "prompt"},
            )
        if self._options.stop and model.codec is None:
            raise InvalidRequestError(
                f"stop strings need a tokenizer, and {model.facts.name} is served without one: "
                "use stop_token_ids"
            )
        self._output = EmittedText(model.codec, self._options.stop, self._options.special_tokens)

    async def _receive(self, model: Model) -> None:
        request = StreamRequest(
            self._prompt_tokens, self._output.token_ids, self._options, self._state.drafting
        )
        stream = self._stream = TokenStream(
            self._state.fleet, model, request, self.stats, self._trace, self._window
        )
        began = perf_counter()
        created = await stream.create()
        self.stats.first_token_ms = (perf_counter() - began) * 1000
        self._reused = created.reused_tokens
        self._publish(verifier_pb2.Round(result=created.first), 0)
        while not self._output.finish_reason:
            response = await stream.receive()
            self._record(response)
            self._publish(response, cost(response))

    def _record(self, response: verifier_pb2.Round) -> None:
        """Add a response to the statistics."""
        if response.steps:
            self.stats.rounds.append(RoundStats.read(response))
        self.stats.fallbacks.update(response.fallbacks)
        if response.fallback_message and response.fallback_message not in self.stats.problems:
            self.stats.problems.append(response.fallback_message)
        for reason in response.fallbacks:
            self._state.fleet.drafting_failed(reason, response.fallback_message)

    def _publish(self, response: verifier_pb2.Round, steps: int) -> None:
        """Add the tokens to the output, and a chunk to the queue of the reader, if there is one.

        `steps` is its cost, which the reader gives back.
        """
        chunk = self._output.add(response, len(self.stats.rounds))
        if self._reading and (chunk.token_ids or chunk.text):
            self._chunks.put_nowait((chunk, steps))

    def _clean_up(self) -> None:
        """Begin the release of the cache, or keep it."""
        stream = self._stream
        if stream is None:
            return
        stream.end()
        if self._options.keep_cache and self._output.finish_reason in ("stop", "length"):
            self._releasing = self._state.in_background(self._renew_lease(stream))
            self._state.kept.add(self)
        else:
            self._releasing = self._state.in_background(stream.release())

    async def _renew_lease(self, stream: TokenStream) -> None:
        """Keep the cache of a finished generation until `aclose`."""
        try:
            while True:
                await asyncio.sleep(stream.lease_seconds / 6)
                await stream.renew()
        finally:
            self._state.kept.discard(self)
            await stream.release()


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


class _Cancelled(Exception):
    """The reason of a generation that `cancel` stopped."""


class ClientState:
    """The generations of one client and the state that they share."""

    def __init__(self, fleet: Fleet, drafting: DraftOptions, unread_chunks: int) -> None:
        self.fleet = fleet
        self.drafting = drafting
        self.unread_chunks = unread_chunks
        self.generations: set[Generation] = set()
        self.kept: set[Generation] = set()
        self._background: set[asyncio.Task[None]] = set()
        self.closed = False
        self._pid: int | None = None

    def check_open(self) -> None:
        """Raises ClientClosedError after `close`, and where calls would wait for ever: in a fork of
        the process that used the client first, or had connections, whose threads it lacks."""
        if self.closed:
            raise ClientClosedError("the client is closed: create a new one")
        if self._pid is None:
            self._pid = os.getpid()
        if self.forked:
            raise ClientClosedError(
                "this process is a fork of one that used a client, and lacks its threads: start "
                "processes with multiprocessing.get_context('spawn'), or fork before the first "
                "client is used"
            )

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of one that used this client, or had connections."""
        return not {self._pid, Connections.pid} <= {None, os.getpid()}

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task that cancelling a user's task does not cancel."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Stop all generations, wait a while for the release of their caches, disconnect."""
        self.closed = True
        self.fleet.ended = self.fleet.ended or "the client was closed"
        for generation in self.generations:
            generation.fail("the client was closed during the generation")
        closing = [
            self.in_background(generation.aclose()) for generation in self.generations | self.kept
        ]
        if pending := {*closing, *self._background}:
            await asyncio.wait(pending, timeout=_CLOSE_TIMEOUT)
        await self.fleet.verifiers.close()
