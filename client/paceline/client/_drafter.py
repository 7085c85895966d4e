"""One generation's drafter: attached, asked, outlived.

Nothing here can fail a generation. A drafter that is late, gone or wrong yields no tree, is counted
in `Stats.fallbacks`, and is attached again after a back-off.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from enum import Enum, auto
from time import monotonic

from paceline.telemetry.names import Span
from paceline.v1 import drafter_pb2, sampling_pb2, tree_pb2, verifier_pb2

from ._errors import PacelineError, UnavailableError
from ._options import DraftOptions
from ._stats import Stats
from ._taps import TapSource, split_version
from ._trace import GenerationTrace
from ._transport import DraftStream, Transport

logger = logging.getLogger("paceline.client")

# Bounds of the wait for a tree, and the multiple of a usual draft that is still waited for.
_SHORTEST_WAIT, _LONGEST_WAIT, _WAIT_FACTOR = 0.05, 2.0, 8.0
# How long a round may wait for an attachment that is under way.
_ATTACH_GRACE = 0.02
# A drafter that owes an answer for longer is lost.
_HUNG_AFTER = 10.0


class DrafterHealth:
    """What a client's generations know of one drafter's state. Shared, so that a dead drafter is
    tried by one generation at a time and not by each."""

    def __init__(self, options: DraftOptions) -> None:
        self._options = options
        self._failures = 0
        self._blocked_until = 0.0

    def may_attach(self) -> bool:
        """Whether the back-off is over."""
        return monotonic() >= self._blocked_until

    def failed(self, *, wrong: bool = False) -> bool:
        """Backs off: exponentially, with jitter; longer at once where the drafter was wrong.

        Returns whether this is news: the first failure since it last did well.
        """
        delay = self._options.first_delay * 2 ** min(self._failures + 3 * wrong, 16)
        delay = min(delay, self._options.longest_delay) * random.uniform(0.5, 1.0)
        self._blocked_until = monotonic() + delay
        self._failures += 1
        return self._failures == 1

    def succeeded(self) -> None:
        """A tree came and was verified."""
        self._failures = 0


class _State(Enum):
    DETACHED = auto()
    ATTACHING = auto()
    READY = auto()
    ASKED = auto()


class DrafterSession:
    """Keeps a drafter in step with the text and asks it for trees, one at a time.

    `ask` sends a request, `answer` waits for its tree as long as is useful. A tree that comes later
    is dropped. One background task reads the stream, since giving up a read would end the stream.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        facts: verifier_pb2.GetModelResponse,
        sampling: sampling_pb2.SamplingParams,
        prompt: list[int],
        output: list[int],
        options: DraftOptions,
        health: DrafterHealth,
        taps: TapSource,
        stats: Stats,
        trace: GenerationTrace | None = None,
    ) -> None:
        self._transport = transport
        self._name = name
        self._facts = facts
        self._sampling = sampling
        self._prompt = prompt
        self._output = output
        self._options = options
        self._health = health
        self._taps = taps
        self._stats = stats
        self._trace = trace
        self._state = _State.DETACHED
        self._stream: DraftStream | None = None
        self._pump: asyncio.Task[None] | None = None
        self._news: asyncio.Future[drafter_pb2.DraftTree | None] | None = None
        self._told = 0
        self._ask_id = 0
        self._asked_at = 0.0
        self._asked_nodes = 0
        self._usual_wait: float | None = None
        self._attached = drafter_pb2.DraftAttached()

    def attach(self, read_grant: bytes) -> None:
        """Gives a drafter all the text so far, unless it is attached or backing off."""
        if self._state is not _State.DETACHED or not self._health.may_attach():
            return
        self._told = len(self._output)
        name, version = split_version(self._name)
        request = drafter_pb2.DraftAttach(
            drafter=name,
            version=version,
            target_fingerprint=self._facts.target_fingerprint,
            tokenizer_digest=self._facts.tokenizer_digest,
            vocab_size=self._facts.vocab_size,
            tokens=self._prompt + self._output,
            prompt_length=len(self._prompt),
            sampling=self._sampling,
            read_grant=read_grant,
            verifier_address=self._transport.verifier_address,
            traceparent="" if self._trace is None else self._trace.traceparent,
        )
        self._state = _State.ATTACHING
        self._asked_at = monotonic()
        self._news = asyncio.get_running_loop().create_future()
        self._stream = self._transport.draft()
        self._pump = asyncio.create_task(self._read_all(self._stream, request))

    async def ask(self, node_budget: int, max_depth: int, committed_length: int) -> bool:
        """Asks for a tree of at most `node_budget` nodes; False where that is no use now."""
        if self._state is _State.ATTACHING:
            grace = _ATTACH_GRACE if self._options.adaptive else self._patience()
            await self._wait_for_news(grace - (monotonic() - self._asked_at))
        if self._state is not _State.READY:
            if self._stream is not None and monotonic() - self._asked_at > _HUNG_AFTER:
                self._lose("drafter_hung", UnavailableError("it owes an answer"))
            return False
        assert self._stream is not None
        self._ask_id += 1
        self._asked_nodes = min(node_budget, self._attached.max_nodes or node_budget)
        request = drafter_pb2.DraftRequest(
            round=drafter_pb2.DraftRound(
                round_id=self._ask_id,
                new_tokens=self._output[self._told :],
                node_budget=self._asked_nodes,
                max_depth=max_depth,
                deadline_ms=int(self._patience() * 1000),
                committed_length=committed_length,
                total_length=len(self._prompt) + len(self._output),
                traceparent="" if self._trace is None else self._trace.begin(Span.DRAFT),
            )
        )
        self._told = len(self._output)
        self._state = _State.ASKED
        self._asked_at = monotonic()
        self._news = asyncio.get_running_loop().create_future()
        # The reading task learns why a write fails.
        with suppress(PacelineError):
            await self._stream.write(request)
        return True

    async def answer(self) -> drafter_pb2.DraftTree | None:
        """The tree asked for; None when it is late, malformed or not to come.

        Only sizes are checked here: the verifier checks everything else.
        """
        tree = await self._wait_for_news(self._patience())
        if self._trace is not None:
            self._trace.end_draft(tree, self._attached)
        if tree is None:
            if self._state is _State.ASKED:
                self._stats.fallbacks["drafter_timeout"] += 1
            return None
        if not _sizes_fit(tree.tree, self._asked_nodes):
            self.distrust("malformed_tree", "the sizes of its tree do not fit together")
            return None
        return tree

    def credit(self, tree: drafter_pb2.DraftTree) -> None:
        """The verifier took the tree."""
        self._health.succeeded()
        version = f"{self._attached.drafter or self._name}@{tree.version or self._attached.version}"
        if version not in self._stats.drafter_versions:
            self._stats.drafter_versions.append(version)

    def distrust(self, reason: str, why: str) -> None:
        """The drafter sent nonsense: leave it alone for a while."""
        self._lose(reason, PacelineError(why), wrong=True)

    def reattach(self, read_grant: bytes) -> None:
        """The cache is a new one: drafters that read KV need its grant."""
        self._detach()
        self.attach(read_grant)

    async def close(self) -> None:
        """Ends the stream."""
        pump = self._pump
        self._detach()
        if pump is not None:
            await asyncio.wait([pump])

    def _patience(self) -> float:
        if self._options.timeout is not None:
            return self._options.timeout
        return min(_LONGEST_WAIT, max(_SHORTEST_WAIT, _WAIT_FACTOR * (self._usual_wait or 0.0)))

    async def _wait_for_news(self, seconds: float) -> drafter_pb2.DraftTree | None:
        """Waits for what the reading task hears next; None after `seconds`."""
        news = self._news
        if news is None:
            return None
        if not news.done():
            if seconds <= 0:
                return None
            timer = news.get_loop().call_later(seconds, _resolve, news, None)
            try:
                return await news
            finally:
                timer.cancel()
        return news.result()

    async def _read_all(self, stream: DraftStream, attach: drafter_pb2.DraftAttach) -> None:
        try:
            await stream.write(drafter_pb2.DraftRequest(attach=attach))
            while (response := await stream.read()) is not None:
                if stream is self._stream:
                    self._hear(response)
            raise UnavailableError("the drafter ended the stream")
        except PacelineError as error:
            if stream is self._stream:
                unavailable = isinstance(error, UnavailableError)
                reason = "drafter_unavailable" if unavailable else "drafter_refused"
                self._taps.forget(self._name)
                self._lose(reason, error, wrong=not unavailable)

    def _hear(self, response: drafter_pb2.DraftResponse) -> None:
        if self._state is _State.ATTACHING and response.HasField("attached"):
            self._attached = response.attached
            self._taps.learn(self._name, response.attached)
            self._state = _State.READY
            _resolve(self._news, None)
        elif self._state is _State.ASKED and response.tree.round_id == self._ask_id:
            wait = monotonic() - self._asked_at
            usual = self._usual_wait if self._usual_wait is not None else wait
            self._usual_wait = usual + 0.2 * (wait - usual)
            self._state = _State.READY
            _resolve(self._news, response.tree)

    def _lose(self, reason: str, error: PacelineError, *, wrong: bool = False) -> None:
        self._stats.fallbacks[reason] += 1
        level = logging.WARNING if self._health.failed(wrong=wrong) else logging.INFO
        logger.log(level, "drafter %r is lost for now (%s): %s", self._name, reason, error)
        self._detach()

    def _detach(self) -> None:
        stream, self._stream, self._state = self._stream, None, _State.DETACHED
        pump, self._pump = self._pump, None
        _resolve(self._news, None)
        if stream is not None:
            stream.cancel()
        if pump is not None and pump is not asyncio.current_task():
            pump.cancel()


def _resolve(
    news: asyncio.Future[drafter_pb2.DraftTree | None] | None,
    tree: drafter_pb2.DraftTree | None,
) -> None:
    if news is not None and not news.done():
        news.set_result(tree)


def _sizes_fit(tree: tree_pb2.TokenTree, most: int) -> bool:
    nodes = len(tree.tokens)
    return (
        nodes <= most
        and len(tree.parents) == nodes
        and len(tree.confidences) in (0, nodes)
        and len(tree.distributions) in (0, nodes)
    )
