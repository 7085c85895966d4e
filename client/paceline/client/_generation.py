"""A generation: awaitable, iterable, cancellable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

from ._cache import Cache
from ._chunks import ChunkQueue
from ._context import GenerationContext
from ._drafter import DrafterSession
from ._errors import ClientClosedError, DeadlineError, InvalidRequestError
from ._model import Model
from ._options import GenerationOptions
from ._output import Chunk, Output, TokenLogprob
from ._rounds import Rounds
from ._shared import Shared
from ._stats import Stats, Usage
from ._trace import GenerationTrace
from ._verifier import VerifierSession


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
    finish_reason: str
    """"stop": end of sequence, stop token or stop string. "length": max_new_tokens, or the
    context is full. "cancelled": `Generation.cancel` was called."""
    stop_string: str | None
    """The stop string that ended the text, if one did."""
    usage: Usage
    stats: Stats
    seed: int
    """Seed of the sampling noise: the same call with this seed returns the same tokens."""


class Generation:
    """A generation request. Await it for the whole result, or iterate over its chunks.

    It starts with the first await or iteration. Leaving an `async for` early, cancelling the
    waiting task, `cancel` and `aclose` stop it and release its cache at once.
    """

    def __init__(
        self, shared: Shared, prompt: str | list[int], options: GenerationOptions, keep_cache: bool
    ) -> None:
        self._shared = shared
        self._prompt = prompt
        self._options = options
        self._keep_cache = keep_cache
        self._chunks = ChunkQueue(shared.unread_chunks)
        self._task: asyncio.Task[GenerationResult] | None = None
        self._cancellable = False
        self._iterated = False
        self._stopped_by: Exception | None = None
        self._prompt_tokens: list[int] = []
        self._output = Output(None, ())
        self._reused = 0
        self._verifier: VerifierSession | None = None
        self._drafter: DrafterSession | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._trace: GenerationTrace | None = None
        self.stats = Stats()
        """Updated while the generation runs."""

    @property
    def handle(self) -> bytes:
        """Handle of the cache, to be the `parent` of another generation; empty without a cache."""
        return self._verifier.cache.handle if self._verifier is not None else b""

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the prompt tokens but the first, once known, if requested."""
        return self._verifier.cache.prompt_logprobs if self._verifier is not None else []

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._result().__await__()

    def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        if self._task is not None or self._iterated:
            raise RuntimeError("the generation has started: iterate before awaiting, and only once")
        self._iterated = True
        return self._stream()

    def cancel(self) -> None:
        """Stops the generation. Awaiting it returns the text so far, as "cancelled"."""
        self._stop(_Cancelled())

    def fail(self, message: str) -> None:
        """Stops the generation. Awaiting it raises ClientClosedError."""
        self._stop(ClientClosedError(message))

    async def aclose(self) -> None:
        """Stops the generation and waits until its cache, kept or not, is released."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # marks it as retrieved
        if self._lease_task is not None:
            self._lease_task.cancel()
            await asyncio.wait([self._lease_task])

    def _stop(self, reason: Exception) -> None:
        self._stopped_by = self._stopped_by or reason
        if self._cancellable and self._task is not None:
            self._cancellable = False
            self._task.cancel()

    def _start(self, *, reading: bool) -> asyncio.Task[GenerationResult]:
        if self._task is None:
            self._chunks.reading = reading
            self._task = asyncio.create_task(self._run())
        return self._task

    async def _result(self) -> GenerationResult:
        task = self._start(reading=False)
        self._chunks.remove_limit()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _stream(self) -> AsyncGenerator[Chunk, None]:
        task = self._start(reading=True)
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
            await asyncio.shield(task)
        finally:
            if not task.done():
                await self.aclose()

    async def _run(self) -> GenerationResult:
        """The task of the generation: generate, release the resources, return the result."""
        began = perf_counter()
        self._shared.running.add(self)
        self._trace = GenerationTrace.start(self._options)
        error: BaseException | None = None
        try:
            await self._generate()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._cancellable = False
            self._chunks.close()
            # In its own task, so that a cancellation cannot interrupt the release of the cache.
            await asyncio.shield(self._shared.in_background(self._clean_up()))
            self.stats.total_ms = (perf_counter() - began) * 1000
            self._shared.running.discard(self)
            if self._trace is not None:
                reason = self._output.finish_reason
                self._trace.finish(self._usage(), self.stats, reason, error)
        output = self._output
        return GenerationResult(
            text=output.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs if self._options.logprobs else None,
            prompt_logprobs=self.prompt_logprobs
            if self._options.prompt_logprobs is not None
            else None,
            finish_reason=output.finish_reason,
            stop_string=output.stop_string,
            usage=self._usage(),
            stats=self.stats,
            seed=self._options.seed,
        )

    def _usage(self) -> Usage:
        return Usage(len(self._prompt_tokens), len(self._output.token_ids), self._reused)

    async def _generate(self) -> None:
        """Runs to the end of the text, the deadline or `cancel`, whichever comes first."""
        deadline = self._options.deadline
        self._cancellable = True
        timeout = asyncio.timeout(deadline)
        try:
            async with timeout:
                if self._stopped_by is not None:
                    raise asyncio.CancelledError
                self._shared.check_open()
                model = await self._shared.fleet.model()
                if self._trace is not None:
                    self._trace.served_by(model.facts.name)
                await self._prepare(model)
                self._reused = await self._rounds(model).run()
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
        else:
            self._prompt_tokens = self._prompt
        if not self._prompt_tokens:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        if self._options.stop and model.codec is None:
            raise InvalidRequestError(
                f"stop strings need a tokenizer, and {model.facts.name} is served without one: "
                "use stop_token_ids"
            )
        self._output = Output(model.codec, self._options.stop)

    def _rounds(self, model: Model) -> Rounds:
        shared, options, name = self._shared, self._options, self._options.drafter or ""
        context = GenerationContext(
            shared.fleet,
            model.facts,
            options,
            self._prompt_tokens,
            self._output.token_ids,
            self.stats,
            self._trace,
            None if options.deadline is None else monotonic() + options.deadline,
        )
        drafts = shared.fleet.has_drafters and name != "none"
        self._verifier = VerifierSession(context, shared.retry, name if drafts else None)
        if drafts:
            self._drafter = DrafterSession(context, name, shared.drafting)
        return Rounds(
            self._verifier,
            self._drafter,
            self._output,
            self._chunks,
            context,
            eager=not shared.drafting.adaptive,
        )

    async def _clean_up(self) -> None:
        verifier, drafter = self._verifier, self._drafter
        if verifier is not None:
            verifier.end_stream()
            if self._keep_cache and self._output.finish_reason in ("stop", "length"):
                self._lease_task = self._shared.in_background(self._renew_lease(verifier.cache))
                self._shared.kept.add(self)
            else:
                await verifier.cache.release()
        if drafter is not None:
            await drafter.close()

    async def _renew_lease(self, cache: Cache) -> None:
        """Keeps the cache of a finished generation until `aclose`."""
        try:
            while True:
                await asyncio.sleep(cache.lease_seconds / 6)
                await cache.renew()
        finally:
            self._shared.kept.discard(self)
            await cache.release()


class _Cancelled(Exception):
    """The reason of a generation that `cancel` stopped."""
