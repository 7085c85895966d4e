"""The target drafts for itself over its verifier's KV, mapped or followed, and changes no token."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from system_support import EAGER, FAMILIES, THREADS, make_prompts, reference

from paceline.client import Client, GenerationResult
from paceline.harness import ServiceProcess

TOKENS = 24
WAYS = {
    "mapped": "kv=map",
    "chosen": "kv=map,kv_policy=verified",
    "pages": "kv=map,kv_policy=quest,widths=2,1",
    "streaming": "kv=follow,kv_policy=streaming",
    "verified": "kv=follow,kv_policy=verified",
    "chunk": "kv=follow,kv_policy=chunk_topk,kv_wire=float8",
    "quest": "kv=follow,kv_policy=quest",
}
SAMPLED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": {3: 2.0, 7: -5.0},
}


@pytest.fixture(scope="module")
def drafter(models: dict[str, Path]) -> Iterator[ServiceProcess]:
    """Every family in every way, in one process."""
    loads = [
        f"--load={family}-{name}=selfspec:{models[family]},context=48,{way}"
        for family in FAMILIES
        for name, way in WAYS.items()
    ]
    with ServiceProcess("drafter", loads, environment=THREADS) as process:
        yield process


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_no_drafter(
    family: str,
    models: dict[str, Path],
    verifiers: Callable[[str], ServiceProcess],
    drafter: ServiceProcess,
) -> None:
    """Greedy and sampled, by every policy."""
    prompts = [prompt * 3 for prompt in make_prompts(4, seed=2)]
    served = await asyncio.to_thread(verifiers, family)
    async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:

        async def generate(name: str, **sampling: object) -> list[GenerationResult]:
            runs = (
                client.generate(
                    prompt,
                    max_new_tokens=TOKENS,
                    seed=seed,
                    drafter=name,
                    ignore_eos=True,
                    **sampling,  # type: ignore[arg-type]
                )
                for seed, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*runs)

        greedy = reference(models[family], prompts, TOKENS)
        sampled = [r.token_ids for r in await generate("none", **SAMPLED)]
        kv_bytes = {}
        for name in WAYS:
            drafted = await generate(f"{family}-{name}")
            assert [r.token_ids for r in drafted] == greedy, name
            rounds = [r for result in drafted for r in result.stats.rounds if r.drafted]
            assert sum(r.accepted for r in rounds) > 0, f"{name} was of no use"
            kv_bytes[name] = sum(r.kv_bytes for r in rounds)
            drafted = await generate(f"{family}-{name}", **SAMPLED)
            assert [r.token_ids for r in drafted] == sampled, name
        assert kv_bytes["mapped"] == 0
        assert 0 < kv_bytes["chosen"] < kv_bytes["verified"] / 10, "positions without their KV"
