"""The drafter of one generation: attachment, draft requests, failures.

No failure of a drafter fails a generation. A drafter that is late, unreachable or wrong drafts no
tree, is counted in `Stats.fallbacks`, and is attached again after a back-off.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from time import monotonic

from paceline.telemetry.names import Span
from paceline.v1 import drafter_pb2, tree_pb2

from ._context import GenerationContext
from ._errors import PacelineError, UnavailableError
from ._hidden_states import split_version
from ._members import DrafterHealth, DrafterService
from ._options import DraftOptions
from ._transport import DraftStream

logger = logging.getLogger("paceline.client")

# Bounds of the default draft timeout. Unit: seconds.
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 0.05, 2.0
# The default draft timeout, as a multiple of the mean draft latency.
_TIMEOUT_FACTOR = 8.0
# Weight of the newest draft in the mean draft latency.
_LATENCY_WEIGHT = 0.2
# How long an adaptive round waits for an attachment in progress. Unit: seconds.
_ATTACH_TIMEOUT = 0.02
# Without a reply for this long a drafter has failed. Unit: seconds.
_HUNG_AFTER = 10.0


class DrafterSession:
    """Sends new tokens to a drafter and requests trees, one at a time.

    `request_tree` sends a request, `receive_tree` waits for its tree until the draft timeout. A
    tree that arrives later is dropped. A background task reads the stream, because cancelling a
    read would end it.
    """

    def __init__(self, context: GenerationContext, name: str, options: DraftOptions) -> None:
        self._context = context
        self._name = name
        self._options = options
        self._service: DrafterService | None = None
        self._health: DrafterHealth | None = None
        # None while detached. A pending reply: the drafter is attaching or drafting.
        self._stream: DraftStream | None = None
        self._reply: asyncio.Future[drafter_pb2.DraftTree | None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._attached: drafter_pb2.DraftAttached | None = None
        self._sent_tokens = 0
        self._round_id = 0
        self._sent_at = 0.0
        self._node_budget = 0
        self._mean_latency: float | None = None

    def attach(self, read_grant: bytes) -> None:
        """Opens a stream and sends all tokens so far, unless attached or backing off."""
        context, facts = self._context, self._context.facts
        if self._stream is not None or context.verifier is None:
            return
        verifier = context.verifier.address
        service = context.fleet.drafter_for(context.verifier, self._name)
        if service is None:
            return
        name, version = split_version(self._name)
        request = drafter_pb2.DraftAttach(
            drafter=name,
            version=version,
            target_fingerprint=facts.target_fingerprint,
            tokenizer_digest=facts.tokenizer_digest,
            vocab_size=facts.vocab_size,
            tokens=context.prompt + context.output,
            prompt_length=len(context.prompt),
            sampling=context.options.sampling(),
            read_grant=read_grant,
            verifier_address=verifier,
            traceparent="" if context.trace is None else context.trace.traceparent,
        )
        self._attached = None
        self._service, self._health = service, service.health(self._name, verifier)
        service.running += 1
        self._stream = service.transport.draft()
        self._expect_reply()
        self._reader = asyncio.create_task(self._read_all(self._stream, request))

    async def request_tree(self, node_budget: int, max_depth: int, committed_length: int) -> bool:
        """Requests a tree of at most `node_budget` nodes.

        Returns:
            False if the drafter is detached, attaching, or still drafting an earlier tree.
        """
        if self._stream is None or self._reply is None:
            return False
        if self._attached is None:
            timeout = _ATTACH_TIMEOUT if self._options.adaptive else self._timeout()
            left = self._sent_at + timeout - monotonic()
            await asyncio.wait([self._reply], timeout=max(0.0, left))
        if self._stream is None or self._attached is None or not self._reply.done():
            if self._stream is not None and monotonic() - self._sent_at > _HUNG_AFTER:
                self._fail("drafter_hung", UnavailableError(f"no reply for {_HUNG_AFTER:g} s"))
            return False
        self._round_id += 1
        self._node_budget = min(node_budget, self._attached.max_nodes or node_budget)
        request = drafter_pb2.DraftRequest(
            round=drafter_pb2.DraftRound(
                round_id=self._round_id,
                new_tokens=self._context.output[self._sent_tokens :],
                node_budget=self._node_budget,
                max_depth=max_depth,
                deadline_ms=int(self._timeout() * 1000),
                committed_length=committed_length,
                total_length=len(self._context.prompt) + len(self._context.output),
                traceparent=self._context.begin_span(Span.DRAFT),
            )
        )
        stream = self._stream
        self._expect_reply()
        # The reading task gets the error of a failed write.
        with suppress(PacelineError):
            await stream.write(request)
        return True

    async def receive_tree(self) -> drafter_pb2.DraftTree | None:
        """The requested tree; None if it is late or malformed, or the drafter failed.

        Only lengths are checked here: the verifier checks everything else.
        """
        assert self._reply is not None
        if not self._reply.done():
            await asyncio.wait([self._reply], timeout=self._timeout())
        if self._reply.done():
            tree = self._reply.result()
        else:
            tree = None
            self._context.stats.fallbacks["drafter_timeout"] += 1
        if self._context.trace is not None:
            self._context.trace.end_draft(tree, self._attached or drafter_pb2.DraftAttached())
        if tree is not None and not _lengths_match(tree.tree, self._node_budget):
            self.record_invalid("malformed_tree", "the tree's fields have different lengths")
            return None
        return tree

    def record_verified(self, tree: drafter_pb2.DraftTree) -> None:
        """Records that the verifier accepted the tree as valid."""
        if self._health is not None:
            self._health.succeeded()
        attached = self._attached or drafter_pb2.DraftAttached()
        version = f"{attached.drafter or self._name}@{tree.version or attached.version}"
        versions = self._context.stats.drafter_versions
        if version not in versions:
            versions.append(version)

    def record_invalid(self, reason: str, why: str) -> None:
        """Detaches a drafter that sent an invalid tree, with a long back-off."""
        self._fail(reason, PacelineError(why), wrong=True)

    def reattach(self, read_grant: bytes) -> None:
        """Attaches anew for a new cache, with its read grant."""
        self._detach()
        self.attach(read_grant)

    async def close(self) -> None:
        """Ends the stream."""
        reader = self._reader
        self._detach()
        if reader is not None:
            await asyncio.wait([reader])

    def _expect_reply(self) -> None:
        self._sent_tokens = len(self._context.output)
        self._sent_at = monotonic()
        self._reply = asyncio.get_running_loop().create_future()

    def _timeout(self) -> float:
        if self._options.timeout is not None:
            return self._options.timeout
        timeout = _TIMEOUT_FACTOR * (self._mean_latency or 0.0)
        return min(_LONGEST_TIMEOUT, max(_SHORTEST_TIMEOUT, timeout))

    async def _read_all(self, stream: DraftStream, attach: drafter_pb2.DraftAttach) -> None:
        try:
            await stream.write(drafter_pb2.DraftRequest(attach=attach))
            while (response := await stream.read()) is not None:
                if stream is self._stream:
                    self._receive(response)
            raise UnavailableError("the drafter ended the stream")
        except PacelineError as error:
            if stream is self._stream:
                unavailable = isinstance(error, UnavailableError)
                reason = "drafter_unavailable" if unavailable else "drafter_refused"
                if self._service is not None:
                    self._service.hidden_states.forget(self._name)
                self._fail(reason, error, wrong=not unavailable)

    def _receive(self, response: drafter_pb2.DraftResponse) -> None:
        if self._reply is None or self._reply.done():
            return
        if self._attached is None and response.HasField("attached"):
            self._attached = response.attached
            if self._service is not None:
                self._service.hidden_states.learn(self._name, response.attached)
            self._reply.set_result(None)
        elif self._attached is not None and response.tree.round_id == self._round_id:
            latency = monotonic() - self._sent_at
            mean = latency if self._mean_latency is None else self._mean_latency
            self._mean_latency = mean + _LATENCY_WEIGHT * (latency - mean)
            self._reply.set_result(response.tree)

    def _fail(self, reason: str, error: PacelineError, *, wrong: bool = False) -> None:
        self._context.stats.fallbacks[reason] += 1
        first = self._health is not None and self._health.failed(wrong=wrong)
        level = logging.WARNING if first else logging.INFO
        logger.log(level, "drafter %r failed (%s), will retry: %s", self._name, reason, error)
        self._detach()

    def _detach(self) -> None:
        stream, self._stream = self._stream, None
        reader, self._reader = self._reader, None
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(None)
        if stream is not None:
            stream.cancel()
            if self._service is not None:
                self._service.running -= 1
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()


def _lengths_match(tree: tree_pb2.TokenTree, node_budget: int) -> bool:
    nodes = len(tree.tokens)
    return (
        nodes <= node_budget
        and len(tree.parents) == nodes
        and len(tree.confidences) in (0, nodes)
        and len(tree.distributions) in (0, nodes)
    )
