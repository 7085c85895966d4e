"""The rounds of one generation on its cache, recovered after broken streams and lost caches."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from time import monotonic

from paceline.telemetry.names import Span
from paceline.v1 import tree_pb2, verifier_pb2

from ._cache import Cache
from ._context import GenerationContext
from ._errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    PreconditionError,
    ServerError,
    UnavailableError,
)
from ._members import Verifier
from ._options import RetryOptions
from ._retry import Attempts
from ._transport import VerifyStream

logger = logging.getLogger("paceline.client")


class VerifierSession:
    """Runs rounds on a cache, and creates it again if it is lost.

    `start` sends a round and `receive` reads its responses. If the stream breaks, the session
    resumes by handle and repeats the round. If that fails too, or the cache is lost, it prefills
    prompt and output again, on the verifier that the fleet chooses, and returns the next token as
    the response. A step that fails inside a verifier is handled the same way once; a second failure
    is raised.

    `drafter` is the name of the drafter, None without one. `receive` returns no token twice if its
    caller appends the tokens of one response to `context.output` before it waits for the next.

    Attributes:
        cache: The cache. Create it before the first round.
        recovered: Whether the session recovered from a failure in this round.
        rejection: Why the verifier refused the tree of this round; None: it did not.
    """

    def __init__(
        self, context: GenerationContext, retry: RetryOptions, drafter: str | None
    ) -> None:
        self._context = context
        self._attempts = Attempts(retry)
        self.cache = Cache(context, self._attempts, drafter)
        self._stream: VerifyStream | None = None
        self._pending = verifier_pb2.VerifyRequest()
        self._received = 0
        self._to_skip = 0
        self._broken = False
        self.recovered = False
        self.rejection: InvalidRequestError | None = None

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

        A tree that the verifier refuses is replaced by a plain step.
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
                self._broken = False
                return response

    def end_stream(self) -> None:
        """Ends the verify stream and keeps the cache."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _send(self) -> None:
        """Writes the pending round; opens a stream if there is none."""
        if self._stream is None:
            assert self._context.verifier is not None, "there is a cache"
            self._stream = self._context.verifier.transport.verify()
            self._pending.handle = self.cache.handle
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
        verifier = self._context.verifier
        here = () if verifier is None else (verifier,)
        if isinstance(error, InvalidRequestError) and self._pending.tree.tokens:
            self.rejection = error
            self._pending.ClearField("tree")
            self._pending.free_run_steps = 1
        elif isinstance(error, (NotFoundError, PreconditionError)):
            logger.info("prefilling again after: %s", error)
            await self._attempts.pause(error)
            if verifier is not None:
                verifier.lost_cache()
            return await self._recreate("verifier_restarted")
        elif isinstance(error, ServerError):
            await self.cache.pause_after_failed_step(error)
            await self.cache.release()  # the failed cache still uses memory
            return await self._recreate("step_failed", avoid=here)
        elif isinstance(error, UnavailableError) or (
            isinstance(error, CapacityError) and error.retry_after is not None
        ):
            if self._broken and isinstance(error, UnavailableError) and await self._leaves(error):
                logger.info("moving to another verifier after: %s", error)
                return await self._recreate("verifier_moved", avoid=here)
            self._broken = True
            logger.info("resuming after: %s", error)
            self._context.stats.fallbacks["verifier_resumed"] += 1
            await self._attempts.pause(error)
        else:
            raise error
        self._to_skip = self._received
        await self._send()
        return None

    async def _leaves(self, error: UnavailableError) -> bool:
        """Whether there is another verifier, after a repeated failure of this one."""
        verifier = self._context.verifier
        assert verifier is not None, "there is a cache"
        self._context.fleet.failed(verifier, error)
        try:
            return await self.cache.choose((verifier,)) is not verifier
        except UnavailableError:
            return False

    async def _recreate(
        self, reason: str, avoid: Collection[Verifier] = ()
    ) -> verifier_pb2.VerifyResponse:
        """Prefills prompt and output again; the next token is the response of the round."""
        round_id, before = self._pending.round_id, self._context.verifier
        self.cache.forget()
        created = await self.cache.create(avoid)
        self._pending, self._broken = verifier_pb2.VerifyRequest(), False
        moved = self._context.verifier is not before
        self._context.stats.fallbacks["verifier_moved" if moved else reason] += 1
        has_budget = created.HasField("node_budget")
        return verifier_pb2.VerifyResponse(
            round_id=round_id,
            result=created.first,
            last=True,
            node_budget=created.node_budget if has_budget else self._context.facts.max_tree_nodes,
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
