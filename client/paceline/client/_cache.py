"""The cache of one generation, on the verifier that the fleet chooses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import aclosing, suppress

from paceline.telemetry.names import Span
from paceline.v1 import verifier_pb2

from ._context import GenerationContext
from ._errors import (
    CapacityError,
    NotFoundError,
    PacelineError,
    ServerError,
    TargetChangedError,
    UnavailableError,
)
from ._hidden_states import HiddenStates
from ._members import Verifier, describe
from ._options import RetryOptions
from ._output import TokenLogprob, prompt_logprobs
from ._retry import Attempts, retry_unavailable

logger = logging.getLogger("paceline.client")

# Longest wait for the release of a cache. The lease releases it otherwise. Unit: seconds.
_RELEASE_TIMEOUT = 2.0


class Cache:
    """Creates the cache of a generation, renews its lease and releases it.

    After a loss it can be created again, on the same verifier or another one: `create` prefills
    prompt and output so far.

    Args:
        context: The generation; its `verifier` is set to that of the cache.
        attempts: Retries, limited in time.
        drafter: Name of the drafter, None without one.

    Attributes:
        handle: Handle of the cache; empty without one.
        read_grant: Grant for drafters.
        lease_seconds: Life of the cache without use. Unit: seconds.
        prompt_logprobs: Those of the prompt, if requested.
    """

    def __init__(self, context: GenerationContext, attempts: Attempts, drafter: str | None) -> None:
        self._context = context
        self._fleet, self._facts = context.fleet, context.facts
        self._stats = context.stats
        self._drafter = drafter
        self._attempts = attempts
        self._parent = context.options.parent_handle
        self._step_failed = False
        self._instance = ""
        self._numerics: tuple[str, ...] | None = None
        self.handle = b""
        self.read_grant = b""
        self.lease_seconds = 30.0
        self.prompt_logprobs: list[TokenLogprob] = []

    async def create(self, avoid: Collection[Verifier] = ()) -> verifier_pb2.CacheCreated:
        """Prefills prompt and output and returns the cache with the next token.

        Tries another verifier if one is unreachable, full or too small, and the same again if there
        is none and it may succeed later.

        Args:
            avoid: Verifiers that are chosen only if there are no others.
        """
        too_small: set[Verifier] = set()
        while True:
            try:
                verifier = await self.choose({*avoid, *too_small})
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
                verifier.refused_cache(error.retry_after)
                if all(each.full for each in self._fleet.serving):
                    limited = self._context.deadline is not None
                    await self._attempts.pause(error, within_deadline=limited)
            except NotFoundError:
                if not self._parent:
                    raise
                self._parent = b""  # released meanwhile: prefill the whole prompt
            except ServerError as error:
                await self.pause_after_failed_step(error)
                self._parent, avoid = b"", {verifier}

    async def renew(self) -> None:
        """Renews the lease of the cache; the next round handles a failure."""
        request = verifier_pb2.RenewLeaseRequest(handle=self.handle)
        if self._context.verifier is not None:
            with suppress(PacelineError):
                await self._context.verifier.transport.renew_lease(request)

    async def release(self) -> None:
        """Releases the cache. Never raises; safe to call again."""
        request = verifier_pb2.ReleaseCacheRequest(handle=self.handle)
        verifier = self.forget()
        if verifier is None:
            return
        transport, attempts = verifier.transport, Attempts(RetryOptions(budget=_RELEASE_TIMEOUT))
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await retry_unavailable(lambda: transport.release_cache(request), attempts)
        except (PacelineError, TimeoutError) as error:
            logger.info("a cache was not released, its lease will expire: %s", error)

    def forget(self) -> Verifier | None:
        """Ends the use of the cache; returns the verifier that has it, None without a cache."""
        handle, self.handle = self.handle, b""
        verifier = self._fleet.caches.pop(handle, None)
        if verifier is not None:
            verifier.running -= 1
            self._fleet.holds(self._context.prompt + self._context.output, verifier)
        return verifier

    async def pause_after_failed_step(self, error: ServerError) -> None:
        """Pauses after the first failed step. Raises `error` for a second one and other faults."""
        if error.reason != "STEP_FAILED" or self._step_failed:
            raise error
        logger.info("prefilling once more after: %s", error)
        self._step_failed = True
        await self._attempts.pause(error)

    async def choose(self, avoid: Collection[Verifier]) -> Verifier:
        """The verifier for the next cache: that of the parent, or the fleet's choice.

        Args:
            avoid: Verifiers that are chosen only if there are no others.

        Raises:
            TargetChangedError: It serves another target than that which began the text.
            UnavailableError: No verifier can be used now.
        """
        context = self._context
        text = context.prompt + context.output
        verifier = await self._fleet.choose(text, numerics=self._numerics, avoid=avoid)
        if self._parent in self._fleet.caches:
            holder = self._fleet.caches[self._parent]
            if holder in self._fleet.serving and holder not in avoid:
                verifier = holder
            else:
                self._parent = b""  # out of reach, or too small: prefill the whole prompt
        facts = verifier.facts or self._facts
        if facts.target_fingerprint != self._facts.target_fingerprint:
            raise TargetChangedError(
                f"the verifier now serves {describe(facts)}, but {describe(self._facts)} began the "
                "text: start a new generation"
            )
        return verifier

    async def _create(self, verifier: Verifier) -> verifier_pb2.CacheCreated:
        options, trace = self._context.options, self._context.trace
        created: verifier_pb2.CacheCreated | None = None
        verifier.running += 1  # before anything is awaited: the next choice counts it
        try:
            request = await self._request(verifier)
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
        return created

    async def _request(self, verifier: Verifier) -> verifier_pb2.CreateCacheRequest:
        context, options, hidden_states = self._context, self._context.options, HiddenStates()
        if self._drafter is not None:
            hidden_states = await self._fleet.hidden_states(verifier, self._drafter)
        traceparent = context.begin_span(Span.PREFILL)
        if context.trace is not None:
            context.trace.placed(verifier.address)
        return verifier_pb2.CreateCacheRequest(
            prompt_tokens=context.prompt,
            output_tokens=context.output,
            sampling=options.sampling(),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            parent_handle=self._parent,
            traceparent=traceparent,
            hidden_state_layers=hidden_states.layers,
            hidden_state_window=hidden_states.window,
            drafter=self._drafter,
            prompt_logprobs=None if self.prompt_logprobs else options.prompt_logprobs,
        )

    def _adopt(
        self, created: verifier_pb2.CacheCreated, verifier: Verifier
    ) -> verifier_pb2.CacheCreated:
        context, stats, facts = self._context, self._stats, verifier.facts or self._facts
        self.handle, self._parent = created.handle, b""
        self._fleet.caches[self.handle] = verifier
        self._fleet.holds(context.prompt + context.output, verifier)
        stats.batch_invariant = facts.batch_invariant and stats.batch_invariant is not False
        if verifier.address and verifier.address not in stats.verifiers:
            stats.verifiers.append(verifier.address)
        if self._instance not in ("", facts.instance_id):
            promised = verifier.numerics is not None and verifier.numerics == self._numerics
            stats.same_numerics = stats.same_numerics and promised
        self._instance, self._numerics = facts.instance_id, verifier.numerics
        context.verifier = verifier
        self.read_grant = created.read_grant
        self.lease_seconds = (created.lease_ms or self._facts.lease_ms or 30_000) / 1000
        if created.prompt_logprobs:
            self.prompt_logprobs = prompt_logprobs(self._context.prompt, created)
        stats.prefill_ms += created.prefill_us / 1000
        if self._context.trace is not None:
            self._context.trace.end_prefill(created)
        return created
