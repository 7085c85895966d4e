"""The verifiers of a client, and which of them serve a generation."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal, TypeVar

from paceline.prefixes import chunk_keys
from paceline.v1 import verifier_pb2

from ._errors import (
    ClientClosedError,
    NotFoundError,
    PacelineError,
    PreconditionError,
    UnavailableError,
)
from ._options import RetryOptions
from ._receipt import Numerics, differing, numerics_of
from ._text import Model, TextCodec, TokenizerCache, drafters_of
from ._transport import DNS, Transport, addresses_of

logger = logging.getLogger("paceline.client")

T = TypeVar("T")

# The model is requested again after this time: a restart with another one takes longer. Unit: s.
MAX_AGE = 0.5
_NAMES_MAX_AGE = 5.0  # DNS names are resolved again after this time, in seconds
# A verifier that has not answered for this long is not waited for if there are others. Unit: s.
PATIENCE = 1.0
# A verifier with the prefix of a text is preferred while it runs at most this many generations
# more than twice the least busy one's.
_HEADROOM = 4
_MAX_CHUNKS = 1 << 16


class Attempts:
    """Delays between attempts at one operation, until it succeeds or the budget is spent.

    If `announce`, the first failure is logged as a warning before the wait.
    """

    def __init__(self, options: RetryOptions, *, announce: bool = True) -> None:
        self._options = options
        self._announce = announce
        self._since: float | None = None
        self._delay = options.first_delay

    async def pause(self, error: PacelineError, *, within_deadline: bool = False) -> None:
        """Wait before the next attempt, at least `error.retry_after`.

        Raises `error` if the wait would exceed the budget. With `within_deadline` the deadline of
        the generation limits the attempts instead.
        """
        now = monotonic()
        self._since = self._since if self._since is not None else now
        delay = max(self._delay * random.uniform(0.5, 1.0), error.retry_after or 0.0)
        if not within_deadline and now + delay - self._since > self._options.budget:
            raise error
        if self._announce and now == self._since and isinstance(error, UnavailableError):
            left = f" for up to {self._options.budget:g} s" if not within_deadline else ""
            logger.warning("%s; trying again%s", error, left)
        self._delay = min(2 * self._delay, self._options.max_delay)
        await asyncio.sleep(delay)

    def succeeded(self) -> None:
        """Reset budget and delay."""
        self._since = None
        self._delay = self._options.first_delay


async def retry_unavailable(call: Callable[[], Awaitable[T]], attempts: Attempts) -> T:
    """Repeat a call that raises UnavailableError; the last one when the budget is spent."""
    while True:
        try:
            return await call()
        except UnavailableError as error:
            await attempts.pause(error)


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
    """One verifier: its calls, its latest answer to `GetModel`, and its load."""

    def __init__(self, transport: Transport, retry: RetryOptions) -> None:
        self.transport = transport
        self.address = transport.address
        self.facts: verifier_pb2.GetModelResponse | None = None  # its latest answer
        self.numerics: Numerics = ()  # what the bits of its tokens depend on; empty: no promise
        self.running = 0  # generations of this client with a cache there
        self.error: PacelineError | None = None  # the failure since the latest answer
        self.refused = ""  # why its target is not the client's; empty if it is
        self._retry = retry
        self._failures = 0
        self._retry_at = 0.0
        self.full_until = 0.0  # it has refused a cache for lack of memory: time of the clock
        self._others = 0
        self._asked_at = self._answered_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether it answered, takes new generations, and answers in time."""
        return self.facts is not None and self.error is None and not self.late

    @property
    def late(self) -> bool:
        """Whether it has not answered for `PATIENCE` seconds: no generation waits for it."""
        pending = self._asking is not None and not self._asking.done()
        return pending and monotonic() - self._asked_at >= PATIENCE

    @property
    def full(self) -> bool:
        return monotonic() < self.full_until

    @property
    def load(self) -> int:
        """Number of running generations: this client's, and others as it told last."""
        return self.running + self._others

    @property
    def due(self) -> bool:
        """Whether its model must be requested before a new generation, or its back-off is over."""
        now = monotonic()
        return now >= self._retry_at if self.error else now - self._answered_at >= MAX_AGE

    def drafters(self) -> list[str]:
        """As `drafters_of` its latest answer."""
        return drafters_of(self.facts) if self.facts is not None else []

    def has_drafter(self, drafter: str) -> bool:
        """Return whether a service that has joined it has a drafter: NAME or NAME@VERSION; or it
        guesses itself: ``local``."""
        name, _, version = drafter.partition("@")
        services = self.facts.drafter_services if self.facts is not None else ()
        return drafter in self.drafters() or any(
            info.name == (name or service.default_drafter) and version in ("", info.version)
            for service in services
            for info in service.drafters
        )

    def status(self) -> VerifierStatus:
        state: Literal["serving", "unavailable", "refused"] = "unavailable"
        if self.usable:
            state = "refused" if self.refused else "serving"
        return VerifierStatus(self.address, state, self.reason(), self.running)

    def reason(self) -> str:
        """Return why it does not serve; empty if it does."""
        if self.error is not None:
            return self.error.message
        return self.refused if self.usable else "it has not answered"

    def ask(self) -> asyncio.Task[None]:
        """Request the model, with one request at a time. The task never fails."""
        if self._asking is None or self._asking.done():
            self._asked_at = monotonic()
            self._asking = asyncio.create_task(self.read_model())
        return self._asking

    def failed(self, error: PacelineError) -> None:
        """Record a failure: it gets no new generation until it answers again."""
        self.error = error
        delay = min(self._retry.first_delay * 2**self._failures, self._retry.max_delay)
        self._retry_at = monotonic() + delay * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 16)

    def lost_cache(self) -> None:
        """Record that a cache is gone: perhaps it restarted, so it is asked again."""
        self._answered_at = float("-inf")

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self.transport.close()

    async def read_model(self) -> None:
        """Request the model. Never raises: a failure is in `error`."""
        running = self.running
        request = verifier_pb2.GetModelRequest(omit_tokenizer=True)
        try:
            facts = await self.transport.get_model(request)
        except PacelineError as error:
            self.failed(error)
            return
        self._answered_at = monotonic()
        if facts.protocol_version != verifier_pb2.PROTOCOL_VERSION_1:
            self.failed(
                PreconditionError(
                    f"the verifier at {self.address} speaks version {facts.protocol_version} of "
                    f"the protocol, this client version {verifier_pb2.PROTOCOL_VERSION_1}: install "
                    "the same version of paceline on both"
                )
            )
            return
        self.facts, self.error = facts, None
        self.numerics = numerics_of(facts)
        self._others = max(0, facts.generations - running)
        if facts.draining:
            self.failed(UnavailableError("it is draining", reason="DRAINING"))
        else:
            self._failures = 0


def differs(facts: verifier_pb2.GetModelResponse, target: verifier_pb2.GetModelResponse) -> str:
    """Return why a verifier cannot continue texts of a target; empty if it can."""
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
    """Return the name and fingerprint of a target."""
    return f"{facts.name} ({facts.target_fingerprint[:12]})"


class PrefixTable:
    """Finds the verifier that served the longest prefix of a text.

    It keeps a key for each chunk of the newest texts.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, tuple[Verifier, str]] = OrderedDict()

    def add(self, tokens: Sequence[int], verifier: Verifier) -> None:
        """Record that a verifier has the KV of a text."""
        for key in chunk_keys(tokens):
            self._holders[key] = verifier, _instance(verifier)
            self._holders.move_to_end(key)
        while len(self._holders) > _MAX_CHUNKS:
            self._holders.popitem(last=False)

    def find(self, tokens: Sequence[int], verifiers: Sequence[Verifier]) -> Verifier | None:
        """Return the verifier with the longest prefix; None if none has a chunk of it."""
        holder = None
        for key in chunk_keys(tokens):
            verifier, instance = self._holders.get(key, (None, ""))
            if verifier is not None and instance == _instance(verifier) and verifier in verifiers:
                holder = verifier
        return holder


def _instance(verifier: Verifier) -> str:
    """Identify the process, whose end frees all KV."""
    return verifier.facts.instance_id if verifier.facts is not None else ""


class Pool:
    """The verifiers behind a list of addresses, one for each.

    An entry "dns:///name:port" stands for all addresses of the name. It is resolved before the
    first use, again after `expire`, and every few seconds while the pool is in use.

    Args:
        make: Creates a verifier from its address and the DNS name that it was resolved from, which
            is empty for other addresses.
        entries: The list; see `parse_addresses`.
    """

    def __init__(self, make: Callable[[str, str], Verifier], entries: tuple[str, ...]) -> None:
        self._make = make
        self._members: dict[str, Verifier] = {}
        self._left: list[Verifier] = []
        self._resolving: asyncio.Task[None] | None = None
        self.failures: dict[str, PacelineError] = {}  # DNS names that could not be resolved
        self.set(entries)

    @property
    def members(self) -> tuple[Verifier, ...]:
        return tuple(self._members.values())

    def set(self, entries: tuple[str, ...]) -> None:
        self._entries = entries
        self._names = [entry for entry in entries if entry.startswith(DNS)]
        self._resolved_at = float("-inf")
        if not self._names:
            self._become(dict.fromkeys(entries, ""))

    def expire(self) -> None:
        """Make the next `update` resolve names again: a verifier failed."""
        self._resolved_at = float("-inf")

    async def update(self) -> None:
        """Resolve names again if that is due. Waits for it only if there is no verifier yet."""
        for member in [member for member in self._left if not member.running]:
            self._left.remove(member)
            await member.close()
        if not self._names or monotonic() - self._resolved_at < _NAMES_MAX_AGE:
            return
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.create_task(self._resolve())
        if not self._members:
            await asyncio.wait([self._resolving])

    async def close(self) -> None:
        if self._resolving is not None:
            self._resolving.cancel()
        for member in (*self._members.values(), *self._left):
            await member.close()

    async def _resolve(self) -> None:
        entries, addresses = self._entries, dict[str, str]()
        failures: dict[str, PacelineError] = {}
        for entry in entries:
            try:
                addresses |= await addresses_of(entry)
            except OSError as error:
                failures[entry] = UnavailableError(f"the name cannot be resolved: {error}")
                logger.warning("%s cannot be resolved, its last addresses stay: %s", entry, error)
        if entries is not self._entries:
            return  # `set` replaced the list meanwhile
        self._resolved_at, self.failures = monotonic(), failures
        self._become((dict.fromkeys(self._members, "") if failures else {}) | addresses)

    def _become(self, addresses: dict[str, str]) -> None:
        """Add and remove verifiers. Generations of a removed one finish there."""
        self._left += [self._members[gone] for gone in self._members if gone not in addresses]
        self._members = {
            address: self._members.get(address) or self._make(address, name)
            for address, name in addresses.items()
        }


class Fleet:
    """The verifiers of a client. One verifier is a fleet of one.

    The first verifier that answers decides the target. Verifiers of another one are refused
    until no verifier of the list was last seen with this one.
    """

    def __init__(self, verifiers: Pool, tokenizers: TokenizerCache, retry: RetryOptions) -> None:
        self.verifiers = verifiers
        self._tokenizers = tokenizers
        self.retry = retry  # when all verifiers are unreachable or full
        self.prefixes = PrefixTable()
        self.ended = ""  # why no verifier is looked for any more; empty: one is
        self._model: Model | None = None
        self._loading = asyncio.Lock()
        self._logged: set[str] = set()
        self._known_drafters: set[str] = set()
        self.caches: dict[bytes, Verifier] = {}  # by handle, of each cache in use or kept

    @property
    def serving(self) -> list[Verifier]:
        """The verifiers that a generation may go to."""
        return [member for member in self.verifiers.members if member.usable and not member.refused]

    async def model(self) -> Model:
        """Return the served model. Raises UnavailableError if no verifier could be used until the
        retry budget was spent, and ClientClosedError if the client was closed meanwhile."""
        return await retry_unavailable(self._current_model, Attempts(self.retry))

    async def choose(
        self,
        text: Sequence[int],
        *,
        numerics: Numerics | None = None,
        avoid: Collection[Verifier] = (),
    ) -> Verifier:
        """Return the verifier for a text: that with its longest prefix, unless it is much busier
        than the least busy one.

        Args:
            text: Prompt and output so far.
            numerics: Those of its output so far: verifiers with equal ones are preferred.
            avoid: Chosen only if there are no others.

        Raises:
            UnavailableError: No verifier can be used now.
        """
        await self._current_model()

        def rank(verifier: Verifier) -> tuple[bool, bool, bool]:
            other_bits = numerics is not None and verifier.numerics != numerics
            return verifier in avoid, verifier.full, other_bits

        serving = self.serving
        best = min(serving, key=lambda member: (*rank(member), member.load, random.random()))
        holder = self.prefixes.find(text, serving)
        if holder is None or rank(holder) != rank(best):
            return best
        return holder if holder.load <= 2 * best.load + _HEADROOM else best

    def failed(self, verifier: Verifier, error: PacelineError) -> None:
        """Record a failure: the verifier gets no new generation until it answers again."""
        if verifier.error is None:
            logger.info("%s failed: %s", verifier.address, error)
        verifier.failed(error)
        self.verifiers.expire()

    def unavailable(self) -> PacelineError:
        """Return why no verifier can be used: the error of the only one, or one that names all."""
        members = self.verifiers.members
        failures = self.verifiers.failures
        errors = [member.error for member in members if member.error is not None]
        if len(members) == 1 and len(errors) == 1:
            return _copy(errors[0], errors[0].message)
        reasons = [
            f"{member.address}: {member.reason() or 'it answers again'}" for member in members
        ]
        reasons += [f"{name}: {error.message}" for name, error in failures.items()]
        message = f"no verifier can be used: {'; '.join(reasons)}"
        if len(errors) < len(members) or any(isinstance(e, UnavailableError) for e in errors):
            return UnavailableError(message)
        return _copy(errors[0], message) if errors else UnavailableError(message)

    async def missing_drafter(self, verifier: Verifier, drafter: str | None) -> str:
        """Return why a verifier lacks the wanted drafter; empty if it has it, or if none is wanted.

        Reads the verifier's model before it says so: perhaps a service has joined a moment ago.

        Args:
            verifier: The verifier of a generation.
            drafter: NAME or NAME@VERSION; None: the verifier's default; "none": none; "local": the
                verifier's own guesses alone.

        Raises:
            NotFoundError: There are drafters, and none ever had this name.
        """
        if drafter is None or drafter == "none" or not verifier.address:
            return ""
        if not verifier.has_drafter(drafter):
            await verifier.read_model()
        if verifier.has_drafter(drafter):
            self._known_drafters.add(drafter)
            return ""
        names = dict.fromkeys(name for member in self.serving for name in member.drafters())
        if names and drafter not in self._known_drafters:
            known = ", ".join(("none", *names))
            raise NotFoundError(
                f"there is no drafter {drafter!r} here; there are: {known}",
                reason="DRAFTER_NOT_FOUND",
                metadata={"param": "drafter"},
            )
        return f"drafter {drafter!r} is not there: no drafter service with it has joined"

    async def drafters(self) -> tuple[str, ...]:
        """Return names of joined drafters, the default one first, and ``local`` where verifiers
        guess by themselves. Raises UnavailableError if no verifier can be reached."""
        await self._current_model()
        # The model of a moment ago lacks a drafter that was just loaded.
        await asyncio.gather(*(member.read_model() for member in self.serving))
        return tuple(dict.fromkeys(name for member in self.serving for name in member.drafters()))

    def drafting_failed(self, reason: str, message: str) -> None:
        """Log a failure of drafting: a warning for the first of its reason, then information."""
        level = logging.INFO if reason in self._logged else logging.WARNING
        self._logged.add(reason)
        logger.log(level, "drafting failed (%s), the text goes on: %s", reason, message)

    async def _current_model(self) -> Model:
        if self.ended:
            raise ClientClosedError(self.ended)
        await self._ask()
        if not any(member.usable for member in self.verifiers.members):
            raise self.unavailable()
        async with self._loading:
            model = await self._agree()
        if not self.serving:
            raise self.unavailable()
        return model

    async def _ask(self) -> None:
        """Request models that are due. Waits for verifiers without a failure, or for any."""
        await self.verifiers.update()
        members = self.verifiers.members
        timeout = PATIENCE if len(members) > 1 else None
        healthy = [member for member in members if member.error is None and not member.late]
        asked = {member: member.ask() for member in members if member.due}
        if waiting := [asked[member] for member in healthy if member in asked]:
            await asyncio.wait(waiting, timeout=timeout)
        if any(member.usable for member in members):
            return
        waiting = [
            member.ask() for member in members if member not in asked or not asked[member].done()
        ]
        while waiting and not any(member.usable for member in members):
            done, pending = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            waiting = [*pending] if done else []

    async def _agree(self) -> Model:
        """Return the model that all verifiers serve. Rejects verifiers with another model."""
        members = self.verifiers.members
        known = [member.facts for member in members if member.facts is not None]
        if self._model is None or all(differs(facts, self._model.facts) for facts in known):
            first = next((member for member in members if member.usable), None)
            if first is None or first.facts is None:
                raise self.unavailable()
            self._model = Model(first.facts, await self._codec(first, first.facts))
        target, codec = self._model.facts, self._model.codec
        for member in members:
            if member.facts is not None:
                member.refused = differs(member.facts, target)
                if member.refused:
                    self._log_once(logging.ERROR, f"{member.address} is not used: {member.refused}")
        serving = self.serving
        if serving and serving[0].facts is not None:
            self._model = Model(serving[0].facts, codec)
        self._compare(serving)
        return self._model

    def _compare(self, serving: list[Verifier]) -> None:
        """Warn of verifiers whose logits may have other bits."""
        for member in serving[1:]:
            one, other = serving[0].numerics, member.numerics
            if regions := "; ".join(differing(one, other)) or (not one and "no promise"):
                self._log_once(
                    logging.WARNING,
                    f"{serving[0].address} and {member.address} differ in numerics: {regions}: the "
                    "tokens of a generation that moves between them may differ; "
                    "Stats.same_numerics tells which did",
                )

    def _log_once(self, level: int, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, message)

    async def _codec(
        self, verifier: Verifier, facts: verifier_pb2.GetModelResponse
    ) -> TextCodec | None:
        if not facts.tokenizer_digest:
            return None
        codec = await asyncio.to_thread(self._tokenizers.find, facts.tokenizer_digest)
        if codec is None:
            facts = await verifier.transport.get_model(verifier_pb2.GetModelRequest())
            codec = await asyncio.to_thread(
                self._tokenizers.add, facts.tokenizer_digest, facts.tokenizer_gzip
            )
        return codec


def _copy(error: PacelineError, message: str) -> PacelineError:
    """Return a copy of the error for another generation, without the traceback of the first."""
    return type(error)(
        message, reason=error.reason, metadata=error.metadata, retry_after=error.retry_after
    )
