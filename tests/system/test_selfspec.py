"""The target drafts for itself over its verifier's KV, mapped or followed, and changes no token."""

import asyncio
from pathlib import Path

import pytest
from system_support import make_prompts

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, DraftOptions, GenerationResult

THREADS = {"OMP_NUM_THREADS": "1"}
WAYS = {
    "mapped": "kv=map",
    "chosen": "kv=map,kv_policy=verified",
    "pages": "kv=map,kv_policy=quest",
    "streaming": "kv=follow,kv_policy=streaming",
    "verified": "kv=follow,kv_policy=verified",
    "chunk": "kv=follow,kv_policy=chunk_topk,kv_wire=float8",
    "quest": "kv=follow,kv_policy=quest",
}


@pytest.mark.parametrize("family", ["qwen3"])
async def test_tokens_are_those_of_no_drafter(family: str, models: dict[str, Path]) -> None:
    target = models[family]
    loads = [f"--load={name}=selfspec:{target},context=48,{way}" for name, way in WAYS.items()]
    options = DraftOptions(timeout=5.0)
    with (
        ServiceProcess("verifier", ["--target", str(target)], environment=THREADS) as served,
        ServiceProcess("drafter", loads, environment=THREADS) as drafter,
    ):
        async with Client(served.address, drafter=drafter.address, drafting=options) as client:

            async def generate(name: str) -> list[GenerationResult]:
                runs = (
                    client.generate(
                        prompt * 3,
                        max_new_tokens=32,
                        temperature=0.8,
                        seed=seed,
                        drafter=name,
                        ignore_eos=True,
                    )
                    for seed, prompt in enumerate(make_prompts(3, seed=2))
                )
                return await asyncio.gather(*runs)

            plain, kv_bytes = await generate("none"), {}
            for name in WAYS:
                drafted = await generate(name)
                assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
                rounds = [r for result in drafted for r in result.stats.rounds if r.drafted]
                assert sum(r.accepted for r in rounds) > 0, f"{name} was of no use"
                kv_bytes[name] = sum(r.kv_bytes for r in rounds)
            assert kv_bytes["mapped"] == 0
            assert 0 < kv_bytes["chosen"] < kv_bytes["verified"] / 10, "positions without their KV"
