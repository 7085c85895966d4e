"""The verifiers and drafter services of a client, and which of them serve a generation."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence

from paceline.v1 import verifier_pb2

from ._addresses import Pool, host_of
from ._errors import PacelineError, UnavailableError
from ._hidden_states import HiddenStates
from ._members import PATIENCE, DrafterService, Verifier, VerifierStatus, differs
from ._model import Model
from ._options import RetryOptions
from ._prefixes import PrefixTable
from ._retry import Attempts, retry_unavailable
from ._text import TextCodec
from ._tokenizer import TokenizerCache

logger = logging.getLogger("paceline.client")

# A verifier with the prefix of a text is preferred while it runs at most this many generations
# more than twice those of the least busy one.
_HEADROOM = 4


class Fleet:
    """The verifiers and drafter services of a client. One verifier is a fleet of one.

    The target is that of the first verifier that answers. Verifiers of another one are refused
    until no verifier of the list was last seen with this one.

    Attributes:
        caches: The verifier of each cache in use or kept, by handle.
    """

    def __init__(
        self,
        verifiers: Pool[Verifier],
        drafters: Pool[DrafterService],
        tokenizers: TokenizerCache,
        retry: RetryOptions,
    ) -> None:
        self._verifiers = verifiers
        self._drafters = drafters
        self._tokenizers = tokenizers
        self._retry = retry
        self._prefixes = PrefixTable()
        self._model: Model | None = None
        self._loading = asyncio.Lock()
        self._logged: set[str] = set()
        self.caches: dict[bytes, Verifier] = {}

    @property
    def has_drafters(self) -> bool:
        """Whether there is a drafter service to call."""
        return bool(self._drafters)

    @property
    def serving(self) -> list[Verifier]:
        """The verifiers that a generation may go to."""
        return [each for each in self._verifiers.members if each.usable and not each.refused]

    def set_verifiers(self, entries: tuple[str, ...]) -> None:
        """Replaces the list of verifiers. Running generations finish where they are."""
        self._verifiers.set(entries)

    def status(self) -> tuple[VerifierStatus, ...]:
        """State of each verifier."""
        return tuple(each.status() for each in self._verifiers.members)

    async def model(self) -> Model:
        """The served model.

        Raises:
            UnavailableError: No verifier could be used until the retry budget was spent.
        """
        return await retry_unavailable(self._current_model, Attempts(self._retry))

    async def choose(
        self,
        text: Sequence[int],
        *,
        numerics: tuple[str, ...] | None = None,
        avoid: Collection[Verifier] = (),
    ) -> Verifier:
        """The verifier for a text: that with its longest prefix, or the least busy one.

        Args:
            text: Prompt and output so far.
            numerics: Those of its output so far: verifiers with equal ones are preferred.
            avoid: Chosen only if there are no others.

        Raises:
            UnavailableError: No verifier can be used now.
        """
        await self._current_model()
        serving = self.serving
        holder = self._prefixes.find(text, serving)
        return choose(serving, holder, numerics=numerics, avoid=avoid)

    def holds(self, text: Sequence[int], verifier: Verifier) -> None:
        """Records that a verifier has the KV of a text."""
        self._prefixes.add(text, verifier)

    def failed(self, verifier: Verifier, error: PacelineError) -> None:
        """Records a failure: the verifier gets no new generation until it answers again."""
        if verifier.error is None:
            logger.info("%s failed: %s", verifier.address, error)
        verifier.failed(error)
        self._verifiers.expire()

    def unavailable(self) -> PacelineError:
        """Why no verifier can be used: the error of the only one, or one that names all."""
        members = self._verifiers.members
        failures = self._verifiers.failures
        errors = [each.error for each in members if each.error is not None]
        if len(members) == 1 and len(errors) == 1:
            return _copy(errors[0], errors[0].message)
        reasons = [f"{each.address}: {each.reason() or 'it answers again'}" for each in members]
        reasons += [f"{name}: {error.message}" for name, error in failures.items()]
        message = f"no verifier can be used: {'; '.join(reasons)}"
        if len(errors) < len(members) or any(isinstance(e, UnavailableError) for e in errors):
            return UnavailableError(message)
        return _copy(errors[0], message) if errors else UnavailableError(message)

    def drafter_for(self, verifier: Verifier, name: str) -> DrafterService | None:
        """The drafter service for a text of a verifier: beside it, else the least busy one.

        Returns None if all are backing off.
        """
        services = self._drafters.members
        ready = [each for each in services if each.health(name, verifier.address).may_attach()]
        host = host_of(verifier.address)
        return min(
            ready, key=lambda each: (each.host != host, each.running, random.random()), default=None
        )

    async def hidden_states(self, verifier: Verifier, name: str) -> HiddenStates:
        """Hidden states that a drafter will read of a cache of a verifier."""
        await self._drafters.update()
        service = self.drafter_for(verifier, name)
        return HiddenStates() if service is None else await service.hidden_states.get(name)

    async def drafters(self) -> tuple[str, ...]:
        """Names of drafters of the first service that answers, its default one first.

        Raises UnavailableError if none can be reached.
        """
        await self._drafters.update()
        errors: list[PacelineError] = [*self._drafters.failures.values()]
        for service in self._drafters.members:
            try:
                listed = await service.transport.list_drafters()
            except PacelineError as error:
                errors.append(error)
                continue
            names = {drafter.name for drafter in listed.drafters}
            return tuple(sorted(names, key=lambda name: (name != listed.default_drafter, name)))
        if errors:
            raise errors[-1]
        return ()

    async def close(self) -> None:
        """Disconnects."""
        await self._verifiers.close()
        await self._drafters.close()

    async def _current_model(self) -> Model:
        await self._ask()
        if not any(each.usable for each in self._verifiers.members):
            raise self.unavailable()
        async with self._loading:
            model = await self._agree()
        if not self.serving:
            raise self.unavailable()
        return model

    async def _ask(self) -> None:
        """Requests models that are due. Waits for verifiers without a failure, or for any."""
        await self._verifiers.update()
        members = self._verifiers.members
        timeout = PATIENCE if len(members) > 1 else None
        healthy = [each for each in members if each.error is None and not each.late]
        asked = {each: each.ask() for each in members if each.due}
        if waiting := [asked[each] for each in healthy if each in asked]:
            await asyncio.wait(waiting, timeout=timeout)
        if any(each.usable for each in members):
            return
        waiting = [each.ask() for each in members if each not in asked or not asked[each].done()]
        while waiting and not any(each.usable for each in members):
            done, pending = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            waiting = [*pending] if done else []

    async def _agree(self) -> Model:
        """The target of the fleet; refuses verifiers of others."""
        members = self._verifiers.members
        known = [each.facts for each in members if each.facts is not None]
        if self._model is None or all(differs(facts, self._model.facts) for facts in known):
            first = next((each for each in members if each.usable), None)
            if first is None or first.facts is None:
                raise self.unavailable()
            self._model = Model(first.facts, await self._codec(first, first.facts))
        target, codec = self._model.facts, self._model.codec
        for each in members:
            if each.facts is not None:
                each.refused = differs(each.facts, target)
                if each.refused:
                    self._log_once(logging.ERROR, f"{each.address} is not used: {each.refused}")
        serving = self.serving
        if serving and serving[0].facts is not None:
            self._model = Model(serving[0].facts, codec)
        self._compare(serving)
        return self._model

    def _compare(self, serving: list[Verifier]) -> None:
        """Warns of verifiers whose logits may have other bits."""
        levels = {each.address: each.numerics for each in serving}
        if len(serving) > 1 and (len(set(levels.values())) > 1 or None in levels.values()):
            listed = ", ".join(
                f"{address} ({'/'.join(level) if level else 'no promise'})"
                for address, level in levels.items()
            )
            self._log_once(
                logging.WARNING,
                f"verifiers differ in numerics: {listed}: the tokens of a generation that moves "
                "between them may differ; Stats.same_numerics tells which did",
            )

    def _log_once(self, level: int, message: str) -> None:
        """Logs a message once."""
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


def choose(
    serving: Sequence[Verifier],
    holder: Verifier | None,
    *,
    numerics: tuple[str, ...] | None = None,
    avoid: Collection[Verifier] = (),
) -> Verifier:
    """Chooses one of several verifiers.

    Args:
        serving: At least one.
        holder: The one with the longest prefix of the text, unless it is much busier; None: none.
        numerics: Verifiers with these are preferred; None: all are equal.
        avoid: Chosen only if there are no others.
    """

    def rank(verifier: Verifier) -> tuple[bool, bool, bool]:
        other_bits = numerics is not None and verifier.numerics != numerics
        return verifier in avoid, verifier.full, other_bits

    best = min(serving, key=lambda each: (*rank(each), each.load, random.random()))
    if holder is None or rank(holder) != rank(best):
        return best
    return holder if holder.load <= 2 * best.load + _HEADROOM else best


def _copy(error: PacelineError, message: str) -> PacelineError:
    """The same error for another generation, without the traceback of the first."""
    return type(error)(
        message, reason=error.reason, metadata=error.metadata, retry_after=error.retry_after
    )
