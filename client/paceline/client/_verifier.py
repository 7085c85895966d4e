"""The cache of one generation on the verifier, recovered after broken streams and restarts."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from time import monotonic

from paceline.telemetry.names import Span
from paceline.v1 import tree_pb2, verifier_pb2

from ._context import GenerationContext
from ._errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    PreconditionError,
    ServerError,
    TargetChangedError,
    UnavailableError,
)
from ._hidden_states import HiddenStates
from ._options import RetryOptions
from ._output import TokenLogprob, prompt_logprobs
from ._retry import Attempts, retry_unavailable
from ._transport import VerifyStream

logger = logging.getLogger("paceline.client")

# Longest wait for the release of a cache. The lease releases it otherwise. Unit: seconds.
_RELEASE_TIMEOUT = 2.0


class VerifierSession:
    """Creates a cache, runs rounds on it, and releases it.

    `start` sends a round and `receive` reads its responses. If the stream breaks, the session
    resumes by handle and repeats the round. If the cache is lost, it prefills prompt and output
    again and returns the next token as the response. A step that fails inside the verifier is
    handled the same way once; a second failure is raised.

    `drafter` is the name of the drafter, None without one. `receive` returns no token twice if its
    caller appends the tokens of one response to `context.output` before it waits for the next.
    """

    def __init__(
        self,
        context: GenerationContext,
        retry: RetryOptions,
        hidden_states: HiddenStates,
        drafter: str | None,
    ) -> None:
        self._context = context
        self._transport, self._facts = context.transport, context.facts
        self._stats = context.stats
        self._hidden_states = hidden_states
        self._drafter = drafter
        self._attempts = Attempts(retry)
        self._parent = context.options.parent_handle
        self._stream: VerifyStream | None = None
        self._pending = verifier_pb2.VerifyRequest()
        self._received = 0
        self._to_skip = 0
        self._step_failed = False
        self.handle = b""
        self.read_grant = b""
        self.lease_seconds = 30.0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.recovered = False
        self.rejection: InvalidRequestError | None = None

    async def open(self) -> verifier_pb2.CacheCreated:
        """Prefills prompt and output and returns the cache with the next token.

        Retries a full verifier if its error says when.
        """
        while True:
            try:
                created = await self._create()
                self._attempts.succeeded()
                return created
            except UnavailableError as error:
                await self._attempts.pause(error)
            except CapacityError as error:
                if error.retry_after is None:
                    raise
                self._stats.fallbacks["verifier_full"] += 1
                limited = self._context.deadline is not None
                await self._attempts.pause(error, within_deadline=limited)
            except NotFoundError:
                if not self._parent:
                    raise
                self._parent = b""  # released meanwhile: prefill the whole prompt
            except ServerError as error:
                await self._pause_after_failed_step(error)
                self._parent = b""

    async def start(self, tree: tree_pb2.TokenTree | None, steps: int) -> None:
        """Sends a round: a tree to verify, or None for a free run of `steps`."""
        self._pending = verifier_pb2.VerifyRequest(
            round_id=self._pending.round_id + 1,
            tree=tree,
            free_run_steps=steps,
            traceparent=self._context.begin_span(Span.VERIFY),
        )
        self._received = self._to_skip = 0
        self.recovered = False
        self.rejection = None
        await self._send()

    async def receive(self) -> verifier_pb2.VerifyResponse:
        """The next response of the round, without tokens that were received before.

        Sets `rejection` if the verifier refused the tree, which it replaces by a plain step, and
        `recovered` if the session recovered from a failure in this round.
        """
        while True:
            try:
                if self._stream is None:
                    raise UnavailableError("the verify stream was not opened")
                response = await self._stream.read()
                if response is None:
                    raise UnavailableError("the verifier ended the stream")
            except PacelineError as error:
                replacement = await self._recover(error)
                if replacement is not None:
                    return replacement
                continue
            if response.round_id == self._pending.round_id and self._drop_received(response):
                self._attempts.succeeded()
                return response

    async def renew(self) -> None:
        """Renews the lease of the cache. The next round handles a failure."""
        with suppress(PacelineError):
            await self._transport.renew_lease(verifier_pb2.RenewLeaseRequest(handle=self.handle))

    def end_stream(self) -> None:
        """Ends the verify stream and keeps the cache."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def close(self) -> None:
        """Ends the stream and releases the cache. Never raises; safe to call again."""
        self.end_stream()
        handle, self.handle = self.handle, b""
        if not handle:
            return
        request = verifier_pb2.ReleaseCacheRequest(handle=handle)
        attempts = Attempts(RetryOptions(budget=_RELEASE_TIMEOUT))
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await retry_unavailable(lambda: self._transport.release_cache(request), attempts)
        except (PacelineError, TimeoutError) as error:
            logger.info("a cache was not released, its lease will expire: %s", error)

    async def _create(self) -> verifier_pb2.CacheCreated:
        options = self._context.options
        request = verifier_pb2.CreateCacheRequest(
            prompt_tokens=self._context.prompt,
            output_tokens=self._context.output,
            sampling=options.sampling(),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            parent_handle=self._parent,
            traceparent=self._context.begin_span(Span.PREFILL),
            hidden_state_layers=self._hidden_states.layers,
            hidden_state_window=self._hidden_states.window,
            drafter=self._drafter,
            prompt_logprobs=None if self.prompt_logprobs else options.prompt_logprobs,
        )
        created: verifier_pb2.CacheCreated | None = None
        try:
            async with aclosing(self._transport.create_cache(request)) as responses:
                # The verifier releases the cache of a call that is cancelled before its end.
                async for response in responses:
                    if response.HasField("created"):
                        created = self._adopt(response.created)
                    elif options.on_prefill is not None:
                        progress = response.progress
                        options.on_prefill(progress.prefilled_tokens, progress.total_tokens)
        except PacelineError as error:
            if created is None:
                if self._context.trace is not None:
                    self._context.trace.end_prefill(error)
                raise
        if created is None:
            raise ServerError("the verifier ended CreateCache without a cache")
        return created

    def _adopt(self, created: verifier_pb2.CacheCreated) -> verifier_pb2.CacheCreated:
        self.handle = created.handle
        self.read_grant = created.read_grant
        self.lease_seconds = (created.lease_ms or self._facts.lease_ms or 30_000) / 1000
        if created.prompt_logprobs:
            self.prompt_logprobs = prompt_logprobs(self._context.prompt, created)
        self._stats.prefill_ms += created.prefill_us / 1000
        self._pending = verifier_pb2.VerifyRequest()
        if self._context.trace is not None:
            self._context.trace.end_prefill(created)
        return created

    async def _send(self) -> None:
        """Writes the pending round; opens a stream if there is none."""
        if self._stream is None:
            self._stream = self._transport.verify()
            self._pending.handle = self.handle
        if self._context.deadline is not None:
            left = self._context.deadline - monotonic()
            self._pending.deadline_ms = max(1, int(left * 1000))
        # A failed write does not tell the reason: the next read raises it.
        with suppress(PacelineError):
            await self._stream.write(self._pending)

    async def _recover(self, error: PacelineError) -> verifier_pb2.VerifyResponse | None:
        """Repeats the pending round after a failure, or returns a response in its place.

        Raises `error` if the session cannot recover from it.
        """
        self.recovered = True
        self.end_stream()
        if isinstance(error, InvalidRequestError) and self._pending.tree.tokens:
            self.rejection = error
            self._pending.ClearField("tree")
            self._pending.free_run_steps = 1
        elif isinstance(error, (NotFoundError, PreconditionError)):
            logger.info("prefilling again after: %s", error)
            await self._attempts.pause(error)
            return await self._recreate("verifier_restarted")
        elif isinstance(error, ServerError):
            await self._pause_after_failed_step(error)
            await self.close()  # the failed cache still uses memory
            return await self._recreate("step_failed")
        elif isinstance(error, UnavailableError) or (
            isinstance(error, CapacityError) and error.retry_after is not None
        ):
            logger.info("resuming after: %s", error)
            self._stats.fallbacks["verifier_resumed"] += 1
            await self._attempts.pause(error)
        else:
            raise error
        self._to_skip = self._received
        await self._send()
        return None

    async def _pause_after_failed_step(self, error: ServerError) -> None:
        """Pauses after the first failed step. Raises `error` for a second one and other faults."""
        if error.reason != "STEP_FAILED" or self._step_failed:
            raise error
        logger.info("prefilling once more after: %s", error)
        self._step_failed = True
        await self._attempts.pause(error)

    async def _recreate(self, reason: str) -> verifier_pb2.VerifyResponse:
        """Prefills prompt and output again; the next token is the response of the round."""
        self._stats.fallbacks[reason] += 1
        round_id = self._pending.round_id
        self.handle = self._parent = b""
        request = verifier_pb2.GetModelRequest(omit_tokenizer=True)
        facts = await retry_unavailable(lambda: self._transport.get_model(request), self._attempts)
        if facts.target_fingerprint != self._facts.target_fingerprint:
            raise TargetChangedError(
                f"the verifier now serves {facts.name} ({facts.target_fingerprint[:12]}), but "
                f"{self._facts.name} ({self._facts.target_fingerprint[:12]}) began the text: start "
                "a new generation"
            )
        if not facts.batch_invariant:
            self._stats.batch_invariant = False
        created = await self.open()
        has_budget = created.HasField("node_budget")
        return verifier_pb2.VerifyResponse(
            round_id=round_id,
            result=created.first,
            last=True,
            node_budget=created.node_budget if has_budget else facts.max_tree_nodes,
            generation=created.generation,
            queue_us=created.queue_us,
        )

    def _drop_received(self, response: verifier_pb2.VerifyResponse) -> bool:
        """Removes tokens received before the stream broke. Returns whether the rest is of use."""
        result = response.result
        if self._to_skip:
            seen = min(self._to_skip, len(result.tokens))
            self._to_skip -= seen
            for values in (result.tokens, result.logprobs, result.top_logprobs):
                del values[:seen]
        self._received += len(result.tokens)
        return bool(result.tokens) or response.last
