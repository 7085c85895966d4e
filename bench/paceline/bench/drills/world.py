"""Where drills happen: real services of their own, texts, and ways to look for leaks."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.bench import prompts
from paceline.bench.drills.drill import Outcome, Scale
from paceline.bench.drills.load import Load, Text
from paceline.client import Client, DraftOptions, RetryOptions
from paceline.harness import ServiceProcess
from paceline.shm import SHM
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_PROMPT_TOKENS = 48
_LEASE_SECONDS = 5.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Services that share few cores with each other and with the load hold each other up least so."""

_READY_SECONDS = 400.0
_SETTLE_SECONDS = 30.0
"""Longest time from the end of all load until nothing may be held any more: leases and more."""


@dataclass
class Services:
    """A verifier, a drafter and a client of both."""

    verifier: ServiceProcess
    drafter: ServiceProcess
    client: Client
    registry: drafter_pb2_grpc.DrafterRegistryServiceStub
    world: World

    def load(
        self,
        drafter: str | None = None,
        slots: int | None = None,
        texts: list[Text] | None = None,
    ) -> Load:
        """Generations of texts, the world's if none are given."""
        slots = slots or self.world.scale.generations
        return Load(self.client, texts or self.world.texts, slots, drafter)

    async def end(self, outcome: Outcome) -> None:
        """Check, once no load is left, that both services let go of everything and end well."""
        outcome.checks["nothing leaked"] = await self._settled()
        code = await asyncio.to_thread(self.verifier.terminate)
        outcome.checks["verifier's books balance"] = code == 0
        if code:
            outcome.figures["verifier's log"] = self.verifier.log_tail(12)
        outcome.checks["drafter ends well"] = await asyncio.to_thread(self.drafter.terminate) == 0

    async def _settled(self) -> bool:
        for _ in range(round(_SETTLE_SECONDS / 0.2)):
            listed = await self.registry.ListDrafters(
                drafter_pb2.ListDraftersRequest(), wait_for_ready=True, timeout=_SETTLE_SECONDS
            )
            streams = sum(drafter.active_streams for drafter in listed.drafters)
            if not segments(self.verifier.pid) and not streams:
                return True
            await asyncio.sleep(0.2)
        return False


class World:
    """What all drills of a run share.

    Attributes:
        target: Model folder.
        work: Scratch folder.
        scale: How large drills are.
        chance: Seeded; decides the random moments.
        prompts: Long ones, as token ids.
        texts: What generations are to produce: told by a verifier that nothing befell.
    """

    def __init__(self, target: Path, prompt_folder: Path, work: Path, scale: Scale) -> None:
        self.target = target
        self.work = work
        self.scale = scale
        self.chance = random.Random(1)
        self.texts: list[Text] = []
        self.prompts = [prompt.tokens for prompt in prompts.load(prompt_folder, target)]

    async def prepare(self) -> None:
        """Have the texts written."""
        self.texts = await self.write([prompt[:_PROMPT_TOKENS] for prompt in self.prompts])

    async def write(self, prompts: list[list[int]]) -> list[Text]:
        """Texts that a verifier goes on with, without any drafter."""
        with self.verifier_process() as verifier:
            async with Client(verifier.address) as client:
                results = await asyncio.gather(
                    *(
                        client.generate(
                            prompt,
                            max_new_tokens=self.scale.tokens,
                            temperature=1.0,
                            seed=seed,
                            ignore_eos=True,
                        )
                        for seed, prompt in enumerate(prompts)
                    )
                )
        return [
            Text(prompt, seed, result.token_ids)
            for seed, (prompt, result) in enumerate(zip(prompts, results, strict=True))
        ]

    @property
    def lm(self) -> str:
        """Drafter specification of a model with weights: the target itself, in short chains."""
        return f"lm:{self.target},widths=1,1,1"

    def verifier_process(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> ServiceProcess:
        """A verifier, not yet started; a later argument wins over a standard one."""
        given = ["--device=cpu", "--target", str(self.target), "--dtype", "float32"]
        lease = ["--lease-seconds", str(_LEASE_SECONDS)]
        return ServiceProcess(
            "verifier",
            [*given, *lease, *arguments],
            environment={**_ONE_THREAD, **(environment or {})},
            wrapper=wrapper,
            ready_seconds=_READY_SECONDS,
        )

    @asynccontextmanager
    async def services(
        self,
        load: Sequence[str] = (),
        *,
        verifier: ServiceProcess | None = None,
        drafter_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Services]:
        """Services for the body.

        Args:
            load: Drafter specifications; the first is the default. None: ``ngram``.
            verifier: If it is not to be a standard one.
            drafter_arguments: More of them.
            environment: Of both processes, over that of this one.
        """
        specs = [f"--load={spec}" for spec in load or ["ngram"]]
        verifier = verifier or self.verifier_process(environment=environment)
        drafter = ServiceProcess(
            "drafter",
            ["--device=cpu", *specs, *drafter_arguments],
            environment={**_ONE_THREAD, **(environment or {})},
            ready_seconds=_READY_SECONDS,
        )
        async with verifier, drafter:
            client = Client(
                verifier.address,
                drafter=drafter.address,
                # Longer than anything is down here, so that only a fault makes a request fail.
                retry=RetryOptions(budget=_READY_SECONDS),
                # Drafting hardly pays for models so small, and nothing would be drilled.
                drafting=DraftOptions(first_delay=0.05, longest_delay=1.0, adaptive=False),
            )
            async with client, grpc.aio.insecure_channel(drafter.address) as channel:
                registry = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
                yield Services(verifier, drafter, client, registry, self)


def creation(text: Text) -> verifier_pb2.CreateCacheRequest:
    """Asks for a cache as a client that leaves the rest to the verifier."""
    return verifier_pb2.CreateCacheRequest(
        prompt_tokens=text.prompt, max_new_tokens=len(text.expected), ignore_eos=True
    )


async def create_cache(channel: grpc.aio.Channel, text: Text) -> verifier_pb2.CacheCreated:
    """A cache of one's own, without a client to look after it."""
    created = verifier_pb2.CacheCreated()
    async for message in verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(creation(text)):
        if message.HasField("created"):
            created = message.created
    return created


def segments(pid: int) -> list[str]:
    """Shared-memory segments that a process holds."""
    return [name for name in os.listdir(SHM) if name.startswith(f"paceline-{pid}-")]


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own alone: what a leak makes grow."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no RssAnon")
