"""One generation's cache on the verifier, kept alive through broken streams and restarts."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from time import monotonic

from paceline.telemetry.names import Span
from paceline.v1 import tree_pb2, verifier_pb2

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
from ._options import GenerationOptions, RetryOptions
from ._retry import Attempts
from ._stats import Stats
from ._taps import NO_TAPS, Taps
from ._trace import GenerationTrace
from ._transport import Transport, VerifyStream

logger = logging.getLogger("paceline.client")

# Longest wait for a cache to be freed. Its lease frees it in any case. Unit: seconds.
_RELEASE_TIMEOUT = 2.0


class VerifierSession:
    """Creates the cache, runs rounds on it, frees it.

    `start` sends a round and `receive` reads its answers. When the stream breaks in between, the
    session resumes by handle and repeats the round; when the cache is gone, it prefills prompt and
    output again and answers the round with the token that follows. The first step that fails inside
    the verifier is overcome in the same way, a second one is an error. Its user sees tokens only.

    `drafter` names who is to draft, if anybody does. `output` is the live list of emitted tokens:
    `receive` never returns a token twice, provided that its user appends what one call returned
    before it calls again.
    """

    def __init__(
        self,
        transport: Transport,
        facts: verifier_pb2.GetModelResponse,
        options: GenerationOptions,
        prompt: list[int],
        output: list[int],
        retry: RetryOptions,
        stats: Stats,
        deadline: float | None,
        trace: GenerationTrace | None = None,
        taps: Taps = NO_TAPS,
        drafter: str | None = None,
    ) -> None:
        self._transport = transport
        self._facts = facts
        self._options = options
        self._prompt = prompt
        self._output = output
        self._stats = stats
        self._deadline = deadline
        self._trace = trace
        self._taps = taps
        self._drafter = drafter
        self._attempts = Attempts(retry)
        self._parent = options.parent_handle
        self._stream: VerifyStream | None = None
        self._pending = verifier_pb2.VerifyRequest()
        self._received = 0
        self._to_skip = 0
        self._step_failed = False
        self.handle = b""
        self.read_grant = b""
        self.lease_seconds = 30.0
        self.disturbed = False
        self.rejection: InvalidRequestError | None = None

    async def open(self) -> verifier_pb2.CacheCreated:
        """Prefills prompt and output; the answer holds the next token.

        Waits for room if the verifier is full and says when to come again.
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
                await self._attempts.pause(error, within_deadline=self._deadline is not None)
            except NotFoundError:
                if not self._parent:
                    raise
                self._parent = b""  # The parent is gone: prefill everything.
            except ServerError as error:
                await self._excuse(error)
                self._parent = b""

    async def start(self, tree: tree_pb2.TokenTree | None, steps: int) -> None:
        """Sends a round: a tree to verify, or None for a free run of `steps`."""
        self._pending = verifier_pb2.VerifyRequest(
            round_id=self._pending.round_id + 1,
            tree=tree,
            free_run_steps=steps,
            traceparent="" if self._trace is None else self._trace.begin(Span.VERIFY),
        )
        self._received = self._to_skip = 0
        self.disturbed = False
        self.rejection = None
        await self._send()

    async def receive(self) -> verifier_pb2.VerifyResponse:
        """The next answer to the round, tokens seen before left out.

        After a call `rejection` says whether the verifier refused the round's tree (the answer is
        then that of a plain step), and `disturbed` whether a failure was overcome.
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
            if response.round_id == self._pending.round_id and self._unseen(response):
                self._attempts.succeeded()
                return response

    async def renew(self) -> None:
        """Keeps the cache alive without a round. A failure shows in the next round."""
        with suppress(PacelineError):
            await self._transport.renew_lease(verifier_pb2.RenewLeaseRequest(handle=self.handle))

    def end_stream(self) -> None:
        """Ends the verify stream; the cache stays."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def close(self) -> None:
        """Ends the stream and frees the cache. Never raises; safe to call again."""
        self.end_stream()
        handle, self.handle = self.handle, b""
        if not handle:
            return
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await self._release(verifier_pb2.ReleaseCacheRequest(handle=handle))
        except (PacelineError, TimeoutError) as error:
            logger.info("a cache was left to its lease: %s", error)

    async def _release(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        """Frees a cache, again if the connection breaks: releasing twice is safe."""
        attempts = Attempts(RetryOptions(budget=_RELEASE_TIMEOUT))
        while True:
            try:
                await self._transport.release_cache(request)
                return
            except UnavailableError as error:
                await attempts.pause(error)

    async def _create(self) -> verifier_pb2.CacheCreated:
        options = self._options
        request = verifier_pb2.CreateCacheRequest(
            prompt_tokens=self._prompt,
            output_tokens=self._output,
            sampling=options.sampling(),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            parent_handle=self._parent,
            traceparent="" if self._trace is None else self._trace.begin(Span.PREFILL),
            hidden_state_layers=self._taps.layers,
            hidden_state_window=self._taps.window,
            drafter=self._drafter,
        )
        created: verifier_pb2.CacheCreated | None = None
        try:
            async with aclosing(self._transport.create_cache(request)) as responses:
                # To the very end: a call that its client leaves is undone, its cache freed.
                async for response in responses:
                    if response.HasField("created"):
                        created = self._adopt(response.created)
                    elif options.on_prefill is not None:
                        progress = response.progress
                        options.on_prefill(progress.prefilled_tokens, progress.total_tokens)
        except PacelineError as error:
            if created is None:
                if self._trace is not None:
                    self._trace.end_prefill(error)
                raise
        if created is None:
            raise ServerError("the verifier ended CreateCache without a cache: this is its fault")
        return created

    def _adopt(self, created: verifier_pb2.CacheCreated) -> verifier_pb2.CacheCreated:
        self.handle = created.handle
        self.read_grant = created.read_grant
        self.lease_seconds = (created.lease_ms or self._facts.lease_ms or 30_000) / 1000
        self._stats.prefill_ms += created.prefill_us / 1000
        self._pending = verifier_pb2.VerifyRequest()
        if self._trace is not None:
            self._trace.end_prefill(created)
        return created

    async def _send(self) -> None:
        """Writes the pending round, opening the stream if need be."""
        if self._stream is None:
            self._stream = self._transport.verify()
            self._pending.handle = self.handle
        if self._deadline is not None:
            left = self._deadline - monotonic()
            self._pending.deadline_ms = max(1, int(left * 1000))
        # A write to a finished call only says that it is finished: the read that follows says why.
        with suppress(PacelineError):
            await self._stream.write(self._pending)

    async def _recover(self, error: PacelineError) -> verifier_pb2.VerifyResponse | None:
        """Repeats the pending round after a failure, or replaces its answer. Raises what cannot
        be overcome."""
        self.disturbed = True
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
            await self._excuse(error)
            await self.close()  # the failed cache still holds memory
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

    async def _excuse(self, error: ServerError) -> None:
        """Waits before the one prefill that failed steps are worth. Raises any other error."""
        if error.reason != "STEP_FAILED" or self._step_failed:
            raise error
        logger.info("prefilling once more after: %s", error)
        self._step_failed = True
        await self._attempts.pause(error)

    async def _recreate(self, reason: str) -> verifier_pb2.VerifyResponse:
        """Prefills prompt and output again; the token that follows is the round's answer."""
        self._stats.fallbacks[reason] += 1
        round_id = self._pending.round_id
        self.handle = self._parent = b""
        facts = await self._facts_now()
        if facts.target_fingerprint != self._facts.target_fingerprint:
            raise TargetChangedError(
                f"the verifier now serves {facts.name} ({facts.target_fingerprint[:12]}), but this "
                f"text was begun by {self._facts.name} ({self._facts.target_fingerprint[:12]}): "
                "generate it anew"
            )
        if not facts.batch_invariant:
            self._stats.batch_invariant = False
        created = await self.open()
        return verifier_pb2.VerifyResponse(
            round_id=round_id,
            result=created.first,
            last=True,
            node_budget=(
                created.node_budget if created.HasField("node_budget") else facts.max_tree_nodes
            ),
            generation=created.generation,
            queue_us=created.queue_us,
        )

    async def _facts_now(self) -> verifier_pb2.GetModelResponse:
        request = verifier_pb2.GetModelRequest(omit_tokenizer=True)
        while True:
            try:
                return await self._transport.get_model(request)
            except UnavailableError as error:
                await self._attempts.pause(error)

    def _unseen(self, response: verifier_pb2.VerifyResponse) -> bool:
        """Cuts tokens that were received before the stream broke; whether anything is left."""
        result = response.result
        if self._to_skip:
            seen = min(self._to_skip, len(result.tokens))
            self._to_skip -= seen
            for values in (result.tokens, result.logprobs, result.top_logprobs):
                del values[:seen]
        self._received += len(result.tokens)
        return bool(result.tokens) or response.last
