"""Drills, their services and expected texts, and checks for leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.bench.drills.load import Load, Outcome, Text, running
from paceline.bench.prompts import demo_prompts
from paceline.bench.services import anonymous_bytes, kv_segments
from paceline.client import Client, DraftOptions, RetryOptions
from paceline.harness import ServiceProcess
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_PROMPT_TOKENS = 48
_LEASE_SECONDS = 5
_READY_SECONDS = 400.0
_IDLE_SECONDS = 30.0  # from the end of all load until nothing may be allocated: leases and more
_POLL_SECONDS = 0.2
# The services share few cores with each other and with the load.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Drill:
    """One fault: its name, what is done, and the function that does it."""

    name: str
    what: str
    run: Callable[[World], Awaitable[Outcome]]


@dataclass(frozen=True)
class Scale:
    """Size of drills."""

    generations: int  # at a time
    tokens: int  # new tokens of each generation
    swaps: int  # versions of a drafter
    hits: int  # how often a process is killed, stopped or restarted
    clients: int  # how many are abandoned


FULL = Scale(generations=16, tokens=64, swaps=50, hits=3, clients=1000)
SHORT = Scale(generations=6, tokens=16, swaps=5, hits=1, clients=40)


@dataclass
class DrillServices:
    """A verifier, a drafter and a client of both."""

    verifier: ServiceProcess
    drafter: ServiceProcess
    client: Client
    registry: drafter_pb2_grpc.DrafterRegistryServiceStub
    world: World

    def load(
        self,
        drafter: str | None = None,
        concurrency: int | None = None,
        texts: list[Text] | None = None,
    ) -> AbstractAsyncContextManager[Load]:
        """See :func:`paceline.bench.drills.load.running`; by default the world's texts."""
        world = self.world
        return running(
            self.client, texts or world.texts, concurrency or world.scale.generations, drafter
        )

    def memory(self) -> list[int]:
        """Anonymous memory of verifier and drafter. Unit: bytes."""
        return [anonymous_bytes(process.pid) for process in (self.verifier, self.drafter)]

    async def end(self, outcome: Outcome) -> None:
        """Check that idle services have freed everything, and that they exit with status 0."""
        outcome.checks["nothing leaked"] = await self._freed()
        code = await asyncio.to_thread(self.verifier.terminate)
        outcome.checks["verifier's counts balance"] = code == 0
        if code:
            outcome.figures["verifier's log"] = self.verifier.log_tail(12)
        code = await asyncio.to_thread(self.drafter.terminate)
        outcome.checks["drafter exits with status 0"] = code == 0

    async def _freed(self) -> bool:
        for _ in range(round(_IDLE_SECONDS / _POLL_SECONDS)):
            listed = await self.registry.ListDrafters(
                drafter_pb2.ListDraftersRequest(), wait_for_ready=True, timeout=_IDLE_SECONDS
            )
            streams = sum(drafter.active_streams for drafter in listed.drafters)
            if not streams and not kv_segments(self.verifier.pid, self.drafter.pid):
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False


class World:
    """What all drills of a run share."""

    def __init__(self, target: Path, prompts: Path, work: Path, scale: Scale) -> None:
        self.target = target  # model folder
        self.work = work  # scratch folder
        self.scale = scale  # size of drills
        self.chance = random.Random(1)  # seeded source of random moments
        # Token ids.
        self.prompts = 2 * demo_prompts(prompts, target)  # each with two seeds
        # What generations must produce, written by an undisturbed verifier.
        self.texts: list[Text] = []

    async def prepare(self) -> None:
        self.texts = await self.write([prompt[:_PROMPT_TOKENS] for prompt in self.prompts])

    async def write(self, prompts: list[list[int]]) -> list[Text]:
        """Expected continuations of prompts, written without a drafter."""
        with self.verifier_process() as verifier:
            async with Client(verifier.address) as client:
                results = await asyncio.gather(
                    *(
                        client.generate(
                            ids,
                            max_new_tokens=self.scale.tokens,
                            temperature=1.0,
                            seed=seed,
                            ignore_eos=True,
                        )
                        for seed, ids in enumerate(prompts)
                    )
                )
        return [Text(ids, n, results[n].token_ids) for n, ids in enumerate(prompts)]

    @property
    def lm(self) -> str:
        """Specification of a drafter with weights: the target itself, in short chains."""
        return f"lm:{self.target},widths=1,1,1"

    def verifier_process(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> ServiceProcess:
        """A verifier, not yet started; a later argument overrides a default one."""
        given = ["--device=cpu", f"--target={self.target}", "--weights=float32"]
        given.append("--no-prefix-caching")  # the KV of ended texts is freed: what is left leaked
        return ServiceProcess(
            "verifier",
            [*given, f"--lease-seconds={_LEASE_SECONDS}", *arguments],
            environment={**_ONE_THREAD, **(environment or {})},
            wrapper=wrapper,
            ready_seconds=_READY_SECONDS,
        )

    @asynccontextmanager
    async def services(
        self,
        load: Sequence[str] = ("ngram",),
        *,
        verifier: ServiceProcess | None = None,
        others: Sequence[ServiceProcess] = (),
        environment: Mapping[str, str] | None = None,
    ) -> AsyncIterator[DrillServices]:
        """Services for the body.

        Args:
            load: Drafter specifications; the first is the default drafter.
            others: Running verifiers that the drafter joins too.
        """
        async with (
            verifier or self.verifier_process(environment=environment) as started,
            ServiceProcess(
                "drafter",
                [
                    "--device=cpu",
                    *(f"--verifier={process.address}" for process in (started, *others)),
                    *(f"--load={spec}" for spec in load),
                ],
                environment={**_ONE_THREAD, **(environment or {})},
                ready_seconds=_READY_SECONDS,
            ) as drafter,
        ):
            client = Client(
                started.address,
                # Longer than any outage here, so that only a fault makes a request fail.
                retry=RetryOptions(budget=_READY_SECONDS),
                # Drafting does not pay for a model this small, and no drill would test it.
                drafting=DraftOptions(adaptive=False),
            )
            async with client, grpc.aio.insecure_channel(drafter.address) as channel:
                registry = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
                yield DrillServices(started, drafter, client, registry, self)


def creation(text: Text) -> verifier_pb2.CreateCacheRequest:
    """The request for a cache of a text."""
    return verifier_pb2.CreateCacheRequest(
        prompt_tokens=text.prompt, max_new_tokens=len(text.expected), ignore_eos=True
    )


async def create_cache(channel: grpc.aio.Channel, text: Text) -> verifier_pb2.CacheCreated:
    """Create a cache without a client that renews and releases it."""
    created = verifier_pb2.CacheCreated()
    async for message in verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(creation(text)):
        if message.HasField("created"):
            created = message.created
    return created


def growth(before: Sequence[int], after: Sequence[int], limit: int, outcome: Outcome) -> None:
    """Check that neither service's memory grew by `limit` bytes or more."""
    grown = [late - early for early, late in zip(before, after, strict=True)]
    outcome.checks[f"memory grew by less than {limit >> 20} MiB"] = max(grown) < limit
    outcome.figures["verifier grew by MiB"] = round(grown[0] / 2**20, 1)
    outcome.figures["drafter grew by MiB"] = round(grown[1] / 2**20, 1)
