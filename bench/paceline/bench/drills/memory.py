"""Runs the verifier out of its KV budget, and out of shared memory."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.load import Text
from paceline.bench.drills.world import Services, World
from paceline.client import InvalidRequestError
from paceline.verifier.kv.layout import BLOCK_TOKENS

_SHM_MIB = 10
_MOUNT = f'mount -t tmpfs -o size={_SHM_MIB}m tmpfs /dev/shm && exec "$@"'


async def out_of_kv(world: World) -> Outcome:
    """A KV budget for three generations, and many more at a time."""
    verifier = world.verifier_process("--kv-bytes=14MiB")
    async with world.services(verifier=verifier) as services:
        outcome = await _overload(services, world.texts)
        # This prompt can never fit: the refusal must be immediate and final.
        try:
            await services.client.generate([1] * 4000, max_new_tokens=1)
            refused = False
        except InvalidRequestError as error:
            refused = error.reason == "PROMPT_TOO_LONG"
        outcome.checks["what never fits is refused"] = refused
        await services.end(outcome)
    return outcome


async def full_shared_memory(world: World) -> Outcome:
    """A /dev/shm of 10 MiB for the verifier alone, and a larger KV budget."""
    return await _small_shared_memory(world, world.texts)


async def outgrown_shared_memory(world: World) -> Outcome:
    """The same, with texts that all need more memory before they end."""
    length = BLOCK_TOKENS - world.scale.tokens // 2
    texts = await world.write([(prompt * length)[:length] for prompt in world.prompts])
    return await _small_shared_memory(world, texts)


async def _small_shared_memory(world: World, texts: list[Text]) -> Outcome:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    wrapper = ["unshare", *user, "--mount", "sh", "-c", _MOUNT, "sh"]
    probe = [*wrapper, "true"]
    if (
        shutil.which("unshare") is None
        or (await asyncio.to_thread(subprocess.run, probe, capture_output=True)).returncode
    ):
        return Outcome(skipped="mount namespaces are not allowed here")
    verifier = world.verifier_process("--kv-bytes=1GiB", wrapper=wrapper)
    async with world.services(verifier=verifier) as services:
        outcome = await _overload(services, texts)
        # A load that never met the limit proves nothing. Within its budget the verifier lets
        # requests wait, so none is refused there.
        outcome.checks["it was full"] = outcome.figures["refused"] != 0
        await services.end(outcome)
    return outcome


async def _overload(services: Services, texts: list[Text]) -> Outcome:
    outcome = Outcome()
    async with services.load(texts=texts) as load:
        await load.more(2 * services.world.scale.generations)
    load.report(outcome)
    outcome.figures["refused"] = load.fallbacks["verifier_full"]
    return outcome


DRILLS = [
    Drill("verifier out of KV", "a KV budget for three generations at a time", out_of_kv),
    Drill("full shared memory", "/dev/shm has no space left", full_shared_memory),
    Drill("outgrown shared memory", "/dev/shm has no space for growth", outgrown_shared_memory),
]
