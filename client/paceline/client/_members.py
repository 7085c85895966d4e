"""One verifier and one drafter service, as the fleet of a client sees them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from paceline.v1 import verifier_pb2

from ._addresses import host_of
from ._errors import PacelineError, UnavailableError
from ._hidden_states import HiddenStateSource
from ._options import DraftOptions, RetryOptions
from ._transport import DrafterTransport, Transport

# The model is requested again after this time: a restart with another one takes longer. Unit: s.
_MAX_AGE = 0.5
# A verifier that has not answered for this long is not waited for if there are others. Unit: s.
PATIENCE = 1.0


@dataclass(frozen=True)
class VerifierStatus:
    """One verifier of a client."""

    address: str
    state: Literal["serving", "unavailable", "refused"]
    """"unavailable": it cannot be reached, is draining or has not answered yet. "refused": it
    serves another target than the others."""
    reason: str
    """Why it does not serve; empty if it does."""
    running: int
    """Number of generations of this client with a cache there."""


class Verifier:
    """One verifier: its calls, its latest answer to `GetModel`, and its load.

    Attributes:
        transport: Its calls.
        facts: Its latest `GetModelResponse`; None before the first.
        running: Number of generations of this client with a cache there.
        error: The failure since the latest answer; None: there is none.
        refused: Why its target is not the client's; empty: it is.
    """

    def __init__(self, transport: Transport, retry: RetryOptions) -> None:
        self.transport = transport
        self.address = transport.address
        self.facts: verifier_pb2.GetModelResponse | None = None
        self.running = 0
        self.error: PacelineError | None = None
        self.refused = ""
        self._retry = retry
        self._failures = 0
        self._retry_at = 0.0
        self._full_until = 0.0
        self._others = 0
        self._asked_at = self._answered_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether it answered, takes new generations, and answers in time."""
        return self.facts is not None and self.error is None and not self.late

    @property
    def late(self) -> bool:
        """Whether it has owed an answer for so long that it is not waited for."""
        pending = self._asking is not None and not self._asking.done()
        return pending and monotonic() - self._asked_at >= PATIENCE

    @property
    def full(self) -> bool:
        """Whether it refused a cache for lack of memory a moment ago."""
        return monotonic() < self._full_until

    @property
    def load(self) -> int:
        """Number of running generations: those of this client, and others as it told last."""
        return self.running + self._others

    @property
    def due(self) -> bool:
        """Whether its model must be requested before a new generation, or its back-off is over."""
        now = monotonic()
        return now >= self._retry_at if self.error else now - self._answered_at >= _MAX_AGE

    @property
    def numerics(self) -> tuple[str, ...] | None:
        """What the bits of logits depend on, besides the text; None: it does not promise them."""
        facts = self.facts
        if facts is None or not facts.numerics:
            return None
        return facts.numerics, facts.weights, facts.dtype, facts.kv_cache_dtype

    def status(self) -> VerifierStatus:
        """Its state now."""
        state: Literal["serving", "unavailable", "refused"] = "unavailable"
        if self.usable:
            state = "refused" if self.refused else "serving"
        return VerifierStatus(self.address, state, self.reason(), self.running)

    def reason(self) -> str:
        """Why it does not serve; empty if it does."""
        if self.error is not None:
            return self.error.message
        return self.refused if self.usable else "it has not answered"

    def ask(self) -> asyncio.Task[None]:
        """Requests the model, with one request at a time. The task never fails."""
        if self._asking is None or self._asking.done():
            self._asked_at = monotonic()
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    def failed(self, error: PacelineError) -> None:
        """Records a failure: it gets no new generation until it answers again."""
        self.error = error
        longest = min(self._retry.first_delay * 2**self._failures, self._retry.longest_delay)
        self._retry_at = monotonic() + longest * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 16)

    def lost_cache(self) -> None:
        """Records that a cache is gone: perhaps it restarted, so it is asked again."""
        self._answered_at = float("-inf")

    def refused_cache(self, seconds: float) -> None:
        """Records that it has no memory for another cache, until `seconds` from now."""
        self._full_until = monotonic() + seconds

    async def close(self) -> None:
        """Disconnects."""
        if self._asking is not None:
            self._asking.cancel()
        await self.transport.close()

    async def _ask(self) -> None:
        running = self.running
        request = verifier_pb2.GetModelRequest(omit_tokenizer=True)
        try:
            facts = await self.transport.get_model(request)
        except PacelineError as error:
            self.failed(error)
            return
        self.facts, self.error, self._answered_at = facts, None, monotonic()
        self._others = max(0, facts.generations - running)
        if facts.draining:
            self.failed(UnavailableError("it is draining", reason="DRAINING"))
        else:
            self._failures = 0


def differs(facts: verifier_pb2.GetModelResponse, target: verifier_pb2.GetModelResponse) -> str:
    """Why a verifier cannot continue texts of a target; empty if it can."""
    if facts.target_fingerprint != target.target_fingerprint:
        return f"it serves {describe(facts)}, but the others {describe(target)}"
    if facts.tokenizer_digest != target.tokenizer_digest:
        return (
            f"its tokenizer is {facts.tokenizer_digest[:12]}, that of the others "
            f"{target.tokenizer_digest[:12]}"
        )
    if facts.max_context != target.max_context:
        return (
            f"its context is {facts.max_context} tokens, that of the others {target.max_context}: "
            "start all with the same --max-context"
        )
    return ""


def describe(facts: verifier_pb2.GetModelResponse) -> str:
    """Name and fingerprint of a target."""
    return f"{facts.name} ({facts.target_fingerprint[:12]})"


class DrafterService:
    """One drafter service: its calls, what its drafters read, and their failures.

    Attributes:
        transport: Its calls.
        running: Number of attached generations of this client.
        hidden_states: Hidden states that its drafters read.
    """

    def __init__(self, transport: DrafterTransport, options: DraftOptions) -> None:
        self.transport = transport
        self.host = host_of(transport.address)
        self.running = 0
        self.hidden_states = HiddenStateSource(transport)
        self._options = options
        self._health: dict[tuple[str, str], DrafterHealth] = {}

    def health(self, drafter: str, verifier: str) -> DrafterHealth:
        """Failures of a drafter of this name for texts of the verifier at this address."""
        return self._health.setdefault((drafter, verifier), DrafterHealth(self._options))

    async def close(self) -> None:
        """Disconnects."""
        await self.transport.close()


class DrafterHealth:
    """Failures and back-off of one drafter, shared by all generations of a client.

    Because it is shared, one generation at a time tries an unreachable drafter.
    """

    def __init__(self, options: DraftOptions) -> None:
        self._options = options
        self._failures = 0
        self._blocked_until = 0.0

    def may_attach(self) -> bool:
        """Whether the back-off is over."""
        return monotonic() >= self._blocked_until

    def failed(self, *, wrong: bool = False) -> bool:
        """Backs off exponentially, with jitter, and longer at once for a wrong reply.

        Returns:
            Whether this is the first failure since the last success.
        """
        delay = self._options.first_delay * 2 ** min(self._failures + 3 * wrong, 16)
        delay = min(delay, self._options.longest_delay) * random.uniform(0.5, 1.0)
        self._blocked_until = monotonic() + delay
        self._failures += 1
        return self._failures == 1

    def succeeded(self) -> None:
        """A tree of the drafter was verified."""
        self._failures = 0
