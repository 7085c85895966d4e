"""Texts of tiny models by real services: with a drafter that knows them, with hostile ones, while
versions are swapped and the drafter service is killed, and without drafts."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from distributions import write_distribution
from draws import Draws, draw_border
from engine_texts import World

from paceline.client import Client, DraftOptions, GenerationResult
from paceline.harness import ServiceProcess
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

TEXTS, ROUNDS, AT_ONCE = 16, 8, 8
HOSTILE = ("random-tree", "always-wrong", "duplicates", "huge", "changing", "malformed", "failing")
_HERE = Path(__file__).parent
_EAGER = DraftOptions(timeout=10.0, adaptive=False)


def run_served_case(world: World, key: str) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Generate texts one by one without drafts, and many times with drafts, ``AT_ONCE`` at a time;
    yields what was drawn for each and what differs."""
    draws = Draws(key, world.drawn)
    draws.drawn |= {"served": "yes"}
    texts = [_draw_text(draws, world) for _ in range(TEXTS)]
    events = [draws.choice(("nothing", "swap", "kill")) for _ in range(ROUNDS)]
    order = [draws.sample(range(TEXTS), TEXTS) for _ in range(ROUNDS)]
    names = [
        [draws.choice(("known", "known", *HOSTILE)) for _ in range(TEXTS)] for _ in range(ROUNDS)
    ]
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        methods = write_distribution(
            Path(folder, "methods"), {"scripted": "scripted_method:ScriptedDrafter"}
        )
        found = asyncio.run(
            _generate(world, texts, Path(folder), methods, events, order, names, draws)
        )
    plain = found[:TEXTS]
    for _ in plain:
        yield {**draws.drawn, "event": "nothing", "drafter": "none"}, []
    for number, result in enumerate(found[TEXTS:]):
        at, place = divmod(number, TEXTS)
        expected = plain[order[at][place]]
        compared = {
            "tokens": result.token_ids == expected.token_ids,
            "log-probabilities": result.logprobs == expected.logprobs,
            "finish": result.finish_reason == expected.finish_reason,
        }
        drafted = "yes" if result.stats.accepted else "no"
        drawn = {
            **draws.drawn,
            "event": events[at],
            "drafter": names[at][place],
            "accepted": drafted,
        }
        yield drawn, [name for name, same in compared.items() if not same]


def _draw_text(draws: Draws, world: World) -> dict[str, Any]:
    """A prompt near a border and how it goes on."""
    longest = len(world.text) - 64
    border = max(64, min(longest, draw_border(draws, world.window, longest)))
    options = draws.choice(({"top_p": 0.9}, {"repetition_penalty": 1.2}, {"min_p": 0.05}, {}))
    return {
        "prompt": world.text[: border - draws.randint(0, 40)],
        "seed": draws.getrandbits(32),
        "temperature": draws.choice((0.0, 0.7, 1.2)),
        "max_new_tokens": draws.choice((8, 30, 60)),
        **options,
    }


async def _generate(
    world: World,
    texts: Sequence[dict[str, Any]],
    folder: Path,
    methods: Path,
    events: Sequence[str],
    order: Sequence[Sequence[int]],
    names: Sequence[Sequence[str]],
    draws: Draws,
) -> list[GenerationResult]:
    """The texts without drafts, and then in each round in its order."""
    paths = [str(_HERE), str(_HERE.parent / "drafter"), str(methods), os.environ.get("PYTHONPATH")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "2"}
    target = ["--target", str(world.source), "--weights", world.weights]
    target += ["--kv-cache-dtype", world.drawn["kv"], "--numerics", world.drawn["numerics"]]
    target += ["--schedule", "off", "--threads", draws.choice("12")]
    verifier = ServiceProcess("verifier", target, environment=environment)
    async with verifier, Client(verifier.address, drafting=_EAGER) as client:

        async def generate(text: dict[str, Any], drafter: str) -> GenerationResult:
            options = {"ignore_eos": True, "logprobs": 2, "drafter": drafter}
            return await client.generate(**text, **options)

        found = [await generate(text, "none") for text in texts]
        recorded = folder / "texts.jsonl"
        lines = [
            json.dumps({"prompt": list(text["prompt"]), "tokens": list(result.token_ids)})
            for text, result in zip(texts, found, strict=True)
        ]
        recorded.write_text("\n".join(lines) + "\n")
        loaded = [
            f"--load=known=scripted:{recorded}",
            *(f"--load={name}={name}" for name in HOSTILE),
        ]
        arguments = [*loaded, f"--verifier={verifier.address}"]
        slots = asyncio.Semaphore(AT_ONCE)

        async def later(index: int, drafter: str) -> GenerationResult:
            async with slots:
                return await generate(texts[index], drafter)

        async with ServiceProcess("drafter", arguments, environment=environment) as drafter:
            for event, indices, chosen in zip(events, order, names, strict=True):
                running = [
                    asyncio.create_task(later(*each)) for each in zip(indices, chosen, strict=True)
                ]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if event == "swap":
                    await _swap(drafter.address, recorded)
                elif event == "kill":
                    await asyncio.to_thread(drafter.kill)
                    await asyncio.to_thread(drafter.start)
                found += await asyncio.gather(*running)
    return found


async def _swap(address: str, recorded: Path) -> None:
    """Load another version of the drafter that knows the texts, for all that begins."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
        request = drafter_pb2.LoadDrafterRequest(
            name="known", method="scripted", folder=str(recorded), activate=True
        )
        await stub.LoadDrafter(request)
