"""Tuning runs on a verifier and a drafter process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import grpc

from paceline.client import Client, DraftOptions, Generation, GenerationResult
from paceline.harness import ServiceProcess
from paceline.tune.steps import TuneError, TuningRun
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

_WARM_UP = 16  # tokens
_LEASE_SECONDS = 7200
_LOAD_SECONDS = 600.0


class TuningServices:
    """A verifier and a drafter process that measure one setting after the other.

    An async context manager. Each prompt is prefilled once: every generation forks the cache of a
    plain one. Every round drafts, also where that is slower.

    Attributes:
        baseline: Speed without a drafter. Unit: tokens/s.
    """

    def __init__(
        self,
        verifier: Sequence[str],
        drafter: drafter_pb2.LoadDrafterRequest,
        prompts: Sequence[str | list[int]],
        *,
        tokens: int,
        temperature: float,
        roots: Sequence[Path],
        on_run: Callable[[TuningRun], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            verifier: Arguments of ``paceline verifier``.
            drafter: Method and folder of the drafter, and the options that all runs share.
            prompts: Text or token ids.
            tokens: New tokens of each prompt.
            temperature: Of sampling.
            roots: Folders that the drafter reads.
            on_run: Called with each run.
        """
        self.baseline = 0.0
        self._load = drafter
        self._prompts, self._tokens, self._temperature = prompts, tokens, temperature
        self._on_run = on_run
        self._count = 0
        lease = f"--lease-seconds={_LEASE_SECONDS}"
        self._verifier = ServiceProcess("verifier", [*verifier, lease])
        self._drafter = ServiceProcess("drafter", [f"--root={root}" for root in roots])
        self._running = AsyncExitStack()
        self._parents: list[Generation] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(self._verifier)
            await starting.enter_async_context(self._drafter)
            channel = grpc.aio.insecure_channel(self._drafter.address)
            await starting.enter_async_context(channel)
            stub: Any = drafter_pb2_grpc.DrafterRegistryServiceStub
            self._registry = stub(channel)
            self._client = await starting.enter_async_context(
                Client(
                    self._verifier.address,
                    drafter_address=self._drafter.address,
                    drafting=DraftOptions(timeout=10.0, adaptive=False),
                )
            )
            self.baseline = _speed([await self._plain(prompt) for prompt in self._prompts])
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        for parent in self._parents:
            await parent.aclose()
        await self._running.aclose()

    async def measure(self, options: Mapping[str, str]) -> TuningRun:
        """Measures the drafter with additional options.

        Raises:
            TuneError: It cannot be loaded with them, or drafts nothing.
        """
        self._count += 1
        name = f"run-{self._count}"
        request = drafter_pb2.LoadDrafterRequest(name=name, activate=True)
        request.MergeFrom(self._load)
        request.options.update(options)
        try:
            await self._registry.LoadDrafter(request, timeout=_LOAD_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise TuneError(f"the drafter cannot be loaded: {error.details()}") from error
        await self._generate(0, name, min(_WARM_UP, self._tokens))
        results = [
            await self._generate(index, name, self._tokens) for index in range(len(self._prompts))
        ]
        unload = drafter_pb2.UnloadDrafterRequest(name=name, force=True)
        await self._registry.UnloadDrafter(unload, timeout=_LOAD_SECONDS)
        rounds = [entry for result in results for entry in result.stats.rounds if entry.drafted]
        if not rounds:
            reasons = {reason for result in results for reason in result.stats.fallbacks}
            raise TuneError(
                f"the drafter drafted nothing with {dict(options)} "
                f"({', '.join(sorted(reasons)) or 'empty trees'}); try it with paceline generate"
            )
        length = sum(entry.emitted for entry in rounds) / len(rounds)
        run = TuningRun(dict(options), length, _speed(results))
        self._on_run(run)
        return run

    async def _plain(self, prompt: str | list[int]) -> GenerationResult:
        """Prefills a prompt, then generates without a drafter from that cache, as every run."""
        parent = self._client.generate(
            prompt, max_new_tokens=1, drafter="none", seed=0, ignore_eos=True, keep_cache=True
        )
        self._parents.append(parent)
        await parent
        return await self._generate(len(self._parents) - 1, "none", self._tokens)

    async def _generate(self, index: int, drafter: str, tokens: int) -> GenerationResult:
        return await self._client.generate(
            self._prompts[index],
            max_new_tokens=tokens,
            temperature=self._temperature,
            seed=index,
            drafter=drafter,
            ignore_eos=True,
            parent=self._parents[index],
        )


def _speed(results: Sequence[GenerationResult]) -> float:
    """Tokens per second after each text's first token."""
    tokens = sum(len(result.token_ids) - 1 for result in results)
    seconds = sum(result.stats.total_ms - result.stats.first_token_ms for result in results) / 1e3
    return tokens / seconds
