"""The verifier's side of a generation: its cache and the stream of its tokens."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import monotonic

from paceline.v1 import verifier_pb2

from ._errors import (
    CapacityError,
    NotFoundError,
    PacelineError,
    PreconditionError,
    ServerError,
    TargetChangedError,
    UnavailableError,
)
from ._fleet import Attempts, Fleet, Verifier, describe, retry_unavailable
from ._options import DraftOptions, GenerationOptions, RetryOptions
from ._receipt import Numerics
from ._stats import GenerationTrace, Stats
from ._text import Model, TokenLogprob, prompt_logprobs
from ._transport import GenerateStream

logger = logging.getLogger("paceline.client")

UNLIMITED = 2**31 - 1  # window of a caller that awaits the result: all steps are granted at once
# Longest wait for the release of a cache. The lease releases it otherwise. Unit: seconds.
_RELEASE_TIMEOUT = 2.0
_RELEASE = RetryOptions(budget=_RELEASE_TIMEOUT)


@dataclass(frozen=True)
class StreamRequest:
    """What a generation asks of its verifier."""

    prompt: Sequence[int]
    output: Sequence[int]
    """Emitted tokens; the generation appends those of each response before it waits for the next.
    """
    options: GenerationOptions
    drafting: DraftOptions

    @property
    def text(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.prompt, *self.output]


class TokenStream:
    """The tokens of one generation, from the verifier that the fleet chooses.

    `create` prefills the prompt, `receive` returns one response after the other, without losing or
    repeating a token. If the stream breaks, it is resumed by handle and position. If that fails
    too, or the cache is lost, prompt and output are prefilled again on the verifier that the fleet
    chooses. A step that fails inside a verifier is handled the same way once; a second failure is
    raised.

    The verifier runs only steps for which it has credits. At most `window` steps are granted or in
    responses that the reader has not taken, and no more than the text needs. Unit: steps.

    `model` is the one that begins the text.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: Model,
        request: StreamRequest,
        stats: Stats,
        trace: GenerationTrace | None,
        window: int,
    ) -> None:
        self._fleet, self._request = fleet, request
        self.facts, self._codec = model.facts, model.codec
        self._stats, self._trace = stats, trace
        self._attempts = Attempts(fleet.retry)
        self._parent = request.options.parent_handle
        self._verifier: Verifier | None = None
        self._instance = ""
        self._numerics: Numerics | None = None
        self._step_failed = False
        self._stream: GenerateStream | None = None
        self._received: deque[verifier_pb2.Round] = deque()
        self._broken = False
        self._late_credits = False
        self._writing = asyncio.Lock()
        self._window = window
        self._granted = 0
        self._unread = 0
        self.handle = b""  # handle of the cache; empty without one
        self.lease_seconds = 30.0  # life of the cache without a stream, in seconds
        self.prompt_logprobs: list[TokenLogprob] = []
        """Log-probabilities of the prompt, if requested."""

    @property
    def numerics(self) -> Numerics:
        """What the bits of its tokens depend on; empty: no promise, or several that differ."""
        return self._numerics or () if self._stats.same_numerics else ()

    async def receive(self) -> verifier_pb2.Round:
        """Return the next round. With `steps` 0 its tokens come from a prefill or an earlier
        stream. Raises PacelineError for a failure from which the generation cannot recover."""
        while True:
            try:
                response = await self._read()
            except PacelineError as error:
                created = await self._recover(error)
                if created is None:
                    continue
                response = verifier_pb2.Round(
                    position=len(self._request.output), result=created.first
                )
            else:
                self._granted = max(0, self._granted - response.steps)
                self._attempts.succeeded()
                self._broken = False
            self._unread += cost(response)
            return response

    async def taken(self, steps: int) -> None:
        """Record that the reader took responses of this cost; grant credits from time to time."""
        self._unread -= steps
        if self._room() >= max(1, self._window // 4):
            await self._grant()

    async def remove_limit(self) -> None:
        """Grant all steps, for a caller that awaits the result."""
        self._window = UNLIMITED
        await self._grant()

    def end(self) -> None:
        """End the stream and keep the cache."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
            self._received.clear()

    async def create(self, avoid: Collection[Verifier] = ()) -> verifier_pb2.CacheCreated:
        """Prefill prompt and output and return the cache with the next token.

        Tries another verifier if one is unreachable, full or too small, and the same again if there
        is none and it may succeed later. Those in `avoid` are chosen only if there are no others.
        """
        too_small: set[Verifier] = set()
        while True:
            try:
                verifier = await self._choose({*avoid, *too_small})
            except UnavailableError as error:
                await self._attempts.pause(error)
                continue
            try:
                created = await self._create(verifier)
                self._attempts.succeeded()
                return created
            except UnavailableError as error:
                self._fleet.failed(verifier, error)
                if not self._fleet.serving:
                    await self._attempts.pause(self._fleet.unavailable())
            except CapacityError as error:
                if error.retry_after is None:
                    too_small.add(verifier)
                    if too_small.issuperset(self._fleet.serving):
                        raise
                    continue
                self._stats.fallbacks["verifier_full"] += 1
                verifier.full_until = monotonic() + error.retry_after
                if all(verifier.full for verifier in self._fleet.serving):
                    limited = self._request.options.deadline is not None
                    await self._attempts.pause(error, within_deadline=limited)
            except NotFoundError as error:
                if error.reason == "DRAFTER_NOT_FOUND":
                    raise
                if not self._parent:  # its memory was needed during the prefill
                    await self._attempts.pause(error)
                self._parent = b""  # or the parent was released: prefill the whole prompt
            except ServerError as error:
                await self._pause_after_failed_step(error)
                self._parent, avoid = b"", {verifier}

    async def renew(self) -> None:
        """Renew the lease of a cache without a stream. Never raises."""
        request = verifier_pb2.RenewLeaseRequest(handle=self.handle)
        if self._verifier is not None:
            with suppress(PacelineError):
                await self._verifier.transport.renew_lease(request)

    async def release(self) -> None:
        """Release the cache. Never raises; safe to call again."""
        request = verifier_pb2.ReleaseCacheRequest(handle=self.handle)
        verifier = self._forget()
        if verifier is None:
            return
        transport = verifier.transport
        # With a verifier that is gone so are its caches: one attempt.
        options = _RELEASE if verifier.error is None else RetryOptions(budget=0.0)
        attempts = Attempts(options, announce=False)
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await retry_unavailable(lambda: transport.release_cache(request), attempts)
        except (PacelineError, TimeoutError) as error:
            logger.info("a cache was not released, its lease will expire: %s", error)

    def _forget(self) -> Verifier | None:
        """End the use of the cache; returns the verifier that has it, None without a cache."""
        handle, self.handle = self.handle, b""
        verifier = self._fleet.caches.pop(handle, None)
        if verifier is not None:
            verifier.running -= 1
            self._fleet.prefixes.add(self._request.text, verifier)
        return verifier

    def _room(self) -> int:
        """Return how many steps the window leaves free."""
        return self._window - self._granted - self._unread

    def _free(self) -> int:
        """Return steps to grant now: those that the window leaves free and the text needs."""
        left = self._request.options.max_new_tokens - len(self._request.output)
        return max(0, min(self._room(), left - self._granted))

    async def _grant(self) -> None:
        """Grant the free steps on the open stream."""
        async with self._writing:
            if self._stream is not None and self._free():
                await self._write(self._stream, None)

    async def _write(
        self, stream: GenerateStream, start: verifier_pb2.GenerateStart | None
    ) -> None:
        """Send the start of a stream, if given, and grant steps."""
        steps = self._free()
        self._granted += steps
        try:
            await stream.write(verifier_pb2.GenerateRequest(start=start, credits=steps))
        except PacelineError:
            # The next read raises the reason. After the start it may be none: gRPC fails a write,
            # and with it all reads, also where the verifier has just ended the whole text.
            self._late_credits = start is None

    async def _open(self) -> GenerateStream:
        """Open a stream at the end of the output."""
        assert self._verifier is not None, "there is a cache"
        options, drafting = self._request.options, self._request.drafting
        start = verifier_pb2.GenerateStart(
            handle=self.handle,
            position=len(self._request.output),
            drafter=options.drafter,
            always_draft=not drafting.adaptive,
            max_nodes=options.max_nodes or 0,
            draft_timeout_ms=math.ceil(1000 * (drafting.timeout or 0)),
            traceparent="" if self._trace is None else self._trace.traceparent,
            isolated=drafting.isolated or options.isolated,
        )
        async with self._writing:  # a reader's credits must not come before the start
            stream = self._stream = self._verifier.transport.generate()
            self._granted, self._late_credits = 0, False
            await self._write(stream, start)
        return stream

    async def _read(self) -> verifier_pb2.Round:
        stream = self._stream or await self._open()
        while not self._received:
            message = await stream.read()
            if message is None:
                raise UnavailableError("the verifier ended the stream before the text")
            self._received.extend(message.rounds)
        response = self._received.popleft()
        if response.position != len(self._request.output):
            raise ServerError(
                f"the verifier sent tokens from position {response.position}, expected "
                f"{len(self._request.output)}: verifier and client must have the same version"
            )
        return response

    async def _recover(self, error: PacelineError) -> verifier_pb2.CacheCreated | None:
        """Prepare the next read after a failure; returns the new cache if there is one.

        Raises `error` if the generation cannot recover from it.
        """
        self.end()
        late, self._late_credits = self._late_credits, False
        if late and isinstance(error, UnavailableError):
            return None
        verifier = self._verifier
        here = () if verifier is None else (verifier,)
        if isinstance(error, (NotFoundError, PreconditionError)):
            logger.info("prefilling again after: %s", error)
            await self._attempts.pause(error)
            if verifier is not None:
                verifier.lost_cache()
            return await self._recreate("verifier_restarted")
        if isinstance(error, ServerError):
            await self._pause_after_failed_step(error)
            await self.release()  # the failed cache still uses memory
            return await self._recreate("step_failed", avoid=here)
        unavailable = isinstance(error, UnavailableError)
        full = isinstance(error, CapacityError) and error.retry_after is not None
        if not unavailable and not full:
            raise error
        if self._broken and unavailable and await self._leaves(error):
            logger.info("moving to another verifier after: %s", error)
            return await self._recreate("verifier_moved", avoid=here)
        self._broken = True
        logger.info("resuming after: %s", error)
        self._stats.fallbacks["verifier_resumed"] += 1
        await self._attempts.pause(error)
        return None

    async def _leaves(self, error: PacelineError) -> bool:
        """Return whether there is another verifier, after a repeated failure of this one."""
        verifier = self._verifier
        assert verifier is not None, "there is a cache"
        self._fleet.failed(verifier, error)
        try:
            return await self._choose((verifier,)) is not verifier
        except UnavailableError:
            return False

    async def _recreate(
        self, reason: str, avoid: Collection[Verifier] = ()
    ) -> verifier_pb2.CacheCreated:
        """Prefill prompt and output again, and count why."""
        before = self._verifier
        self._forget()
        created = await self.create(avoid)
        self._broken = False
        moved = self._verifier is not before
        self._stats.fallbacks["verifier_moved" if moved else reason] += 1
        return created

    async def _pause_after_failed_step(self, error: ServerError) -> None:
        """Pause after the first failed step. Raises `error` for a second one and other faults."""
        if error.reason != "STEP_FAILED" or self._step_failed:
            raise error
        logger.info("prefilling once more after: %s", error)
        self._step_failed = True
        await self._attempts.pause(error)

    async def _choose(self, avoid: Collection[Verifier]) -> Verifier:
        """Return the verifier for the next cache: the parent's, or the fleet's choice. Those in
        `avoid` are chosen only if there are no others.

        Raises:
            TargetChangedError: It serves another target than that which began the text.
            UnavailableError: No verifier can be used now.
        """
        text = self._request.text
        verifier = await self._fleet.choose(text, numerics=self._numerics, avoid=avoid)
        if self._parent in self._fleet.caches:
            holder = self._fleet.caches[self._parent]
            if holder in self._fleet.serving and holder not in avoid:
                verifier = holder
            else:
                self._parent = b""  # out of reach, or too small: prefill the whole prompt
        facts = verifier.facts or self.facts
        if facts.target_fingerprint != self.facts.target_fingerprint:
            raise TargetChangedError(
                f"the verifier now serves {describe(facts)}, but {describe(self.facts)} began the "
                "text: start a new generation"
            )
        return verifier

    async def _create(self, verifier: Verifier) -> verifier_pb2.CacheCreated:
        options, trace = self._request.options, self._trace
        created: verifier_pb2.CacheCreated | None = None
        verifier.running += 1  # before anything is awaited: the next choice counts it
        try:
            # Before the prefill, because the cache keeps the hidden states that the drafter reads.
            try:
                missing = await self._fleet.missing_drafter(verifier, options.drafter)
            except NotFoundError as error:
                if not self._request.output:
                    raise
                missing = error.message
            if missing:
                self._stats.fallbacks["drafter_unavailable"] += 1
                self._stats.problems.append(missing)
            request = self._creation(verifier)
            async with aclosing(verifier.transport.create_cache(request)) as responses:
                # The verifier releases the cache of a call that is cancelled before its end.
                async for response in responses:
                    if response.HasField("created"):
                        created = self._adopt(response.created, verifier)
                    elif options.on_prefill is not None:
                        progress = response.progress
                        options.on_prefill(progress.prefilled_tokens, progress.total_tokens)
        except PacelineError as error:
            if created is None:
                if trace is not None:
                    trace.end_prefill(error)
                raise
        finally:
            verifier.running -= created is None
        if created is None:
            raise ServerError("the verifier ended CreateCache without a cache")
        if created.prompt_logprobs:  # of a prompt there may be thousands
            self.prompt_logprobs = await asyncio.to_thread(
                prompt_logprobs, self._request.prompt, created, self._codec
            )
        return created

    def _creation(self, verifier: Verifier) -> verifier_pb2.CreateCacheRequest:
        options, trace = self._request.options, self._trace
        return verifier_pb2.CreateCacheRequest(
            prompt_tokens=self._request.prompt,
            output_tokens=self._request.output,
            sampling=options.to_proto(),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs is not False,
            top_logprobs=0 if isinstance(options.logprobs, bool) else options.logprobs,
            parent_handle=self._parent,
            traceparent="" if trace is None else trace.begin_prefill(verifier.address),
            drafter=options.drafter,
            user=options.user,
            prompt_logprobs=None if self.prompt_logprobs else options.prompt_logprobs,
        )

    def _adopt(
        self, created: verifier_pb2.CacheCreated, verifier: Verifier
    ) -> verifier_pb2.CacheCreated:
        stats, facts = self._stats, verifier.facts or self.facts
        self.handle, self._parent = created.handle, b""
        self._fleet.caches[self.handle] = verifier
        self._fleet.prefixes.add(self._request.text, verifier)
        stats.batch_invariant = facts.batch_invariant and stats.batch_invariant is not False
        if verifier.address and verifier.address not in stats.verifiers:
            stats.verifiers.append(verifier.address)
        if self._instance not in ("", facts.instance_id):
            promised = bool(verifier.numerics) and verifier.numerics == self._numerics
            stats.same_numerics = stats.same_numerics and promised
        self._instance, self._numerics = facts.instance_id, verifier.numerics
        self._verifier = verifier
        self.lease_seconds = (created.lease_ms or self.facts.lease_ms or 30_000) / 1000
        stats.prefill_ms += created.prefill_us / 1000
        if self._trace is not None:
            self._trace.end_prefill(created)
        return created


def cost(response: verifier_pb2.Round) -> int:
    """Return steps that a response uses of a reader's window: also 1 for tokens received again."""
    return max(1, response.steps)
