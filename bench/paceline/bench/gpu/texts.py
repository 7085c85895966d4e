"""Compares texts of the demo model with and without drafts, alone and beside others, as served.

One text at a time without a drafter is what every other way must give: each drafter, with trees as
it drafts them by default, for 1, 7 and 32 texts at once, in each format of weights.

    python -m paceline.bench.gpu.texts cuda 0      # reports lines of JSON; cpu: fewer texts

Fails if a text differs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.bench.gpu.cases import arguments, report
from paceline.bench.prompts import demo_prompts
from paceline.bench.services import ALWAYS
from paceline.client import Client
from paceline.harness import ServiceProcess

DEMO = Path("models/demo")
FORMATS = ("bfloat16", "int8")
DRAFTERS = ("ngram", "longspec", "dspark")
AT_ONCE = (1, 7, 32)
TEXTS, TOKENS = 32, 160
ALONE = 12
"""Texts that each drafter writes one at a time: the first of all."""


@dataclass(frozen=True)
class Job:
    """A text to be continued, greedily or sampled."""

    prompt: list[int]
    temperature: float
    seed: int


def jobs(count: int) -> list[Job]:
    """Ends of demo prompts of different lengths; every second text is sampled."""
    prompts = demo_prompts(DEMO / "prompts", DEMO / "target")
    chosen = [prompts[index % len(prompts)] for index in range(count)]
    return [Job(ids[-300 + 7 * n :], 0.8 * (n % 2), n) for n, ids in enumerate(chosen)]


async def write(
    client: Client, drafter: str, texts: Sequence[Job], at_once: int, tokens: int
) -> tuple[list[list[int]], float]:
    """Generate texts; returns their tokens, and tokens a drafted round."""
    gate = asyncio.Semaphore(at_once)

    async def one(job: Job) -> Any:
        async with gate:
            return await client.generate(
                job.prompt, max_new_tokens=tokens, temperature=job.temperature,
                seed=job.seed, drafter=drafter, ignore_eos=True,
            )  # fmt: skip

    results = await asyncio.gather(*map(one, texts))
    rounds = [entry for result in results for entry in result.stats.rounds if entry.drafted]
    emitted = sum(entry.emitted for entry in rounds) / max(1, len(rounds))
    return [list(result.token_ids) for result in results], round(emitted, 2)


async def compare(verifier: str, drafter: str, weights: str, count: int, tokens: int) -> list[str]:
    """Report each way of writing the texts; returns those that changed one."""
    changed = []
    texts = jobs(count)
    async with Client(verifier, drafter_address=drafter, drafting=ALWAYS) as client:
        right, _ = await write(client, "none", texts, 1, tokens)
        ways = [
            (name, n) for name in ("none", *DRAFTERS) for n in AT_ONCE if (name, n) != ("none", 1)
        ]
        for name, at_once in ways:
            some = texts[: ALONE if at_once == 1 else count]
            found, emitted = await write(client, name, some, at_once, tokens)
            pairs = list(zip(right, found, strict=False))
            firsts = [
                next(at for at, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
                for pair in pairs
                if pair[0] != pair[1]
            ]
            case = f"{weights}, {name}, {at_once} at once"
            report(
                case,
                {
                    "texts": len(some), "different": len(firsts),
                    "tokens_a_round": emitted, "first_different_tokens": sorted(firsts)[:8],
                },
            )  # fmt: skip
            if firsts:
                changed.append(case)
    return changed


def main() -> None:
    """Start both services for each format, and compare."""
    device = arguments()
    target = DEMO / "target"
    specs = {name: f"{name}:{DEMO / name},target={target}" for name in DRAFTERS} | {
        "ngram": "ngram,shared_tokens=0"  # without the memory of other texts
    }
    count, tokens = (TEXTS, TOKENS) if device.type == "cuda" else (4, 24)
    changed: list[str] = []
    for weights in FORMATS:
        given = ["--target", str(target), "--weights", weights, "--device", device.type]
        load = [argument for name in specs for argument in ("--load", f"{name}={specs[name]}")]
        with (
            ServiceProcess("verifier", [*given, "--kv-bytes=512MiB"]) as verifier,
            ServiceProcess(
                "drafter", ["--device", device.type, f"--verifier={verifier.address}", *load]
            ) as drafter,
        ):
            changed += asyncio.run(
                compare(verifier.address, drafter.address, weights, count, tokens)
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if changed:
        sys.exit(f"texts depend on how they are written: {'; '.join(changed)}")


if __name__ == "__main__":
    main()
