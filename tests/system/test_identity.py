"""The main promise, through real processes: the same tokens whoever drafts."""

import asyncio
from pathlib import Path

import pytest
from system_support import FAMILIES, HOSTILE, make_prompts, reference

from paceline.cli.processes import ServiceProcess
from paceline.client import Client

pytestmark = pytest.mark.bits

USEFUL = ("lm", "ngram")
CONCURRENT = 8
TOKENS = 64
SAMPLINGS = {
    "T1": {"temperature": 1.0},
    "filtered": {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 2.0, 7: -5.0, 11: 1.0},
    },
}


async def generate_all(
    client: Client, prompts: list[list[int]], drafter: str, tokens: int = TOKENS, **options: object
) -> tuple[list[list[int]], int]:
    """Outputs, `CONCURRENT` at a time, and how many tokens were accepted from drafts."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(index: int, prompt: list[int]) -> tuple[list[int], int]:
        async with slots:
            result = await client.generate(
                prompt,
                max_new_tokens=tokens,
                drafter=drafter,
                seed=index,
                **options,  # type: ignore[arg-type]
            )
            return result.token_ids, result.stats.accepted

    results = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    return [ids for ids, _ in results], sum(accepted for _, accepted in results)


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_transformers(
    family: str, models: dict[str, Path], drafter: ServiceProcess
) -> None:
    """200 prompts x 64 tokens in fp32, no drafter and every drafter, 8 at a time."""
    prompts = make_prompts(200)
    expected = reference(models[family], prompts, TOKENS)
    arguments = ["--target", str(models[family]), "--dtype", "float32", "--schedule", "off"]
    async with ServiceProcess(
        "verifier", arguments, environment={"OMP_NUM_THREADS": "1"}
    ) as served:
        async with Client(served.address, drafter=drafter.address) as client:
            plain, _ = await generate_all(client, prompts, "none")
            assert plain == expected
            for name in USEFUL:
                output, accepted = await generate_all(client, prompts, name)
                assert output == expected, name
                assert accepted, f"{name} never guessed right: the test shows nothing"
            for name in HOSTILE:
                output, _ = await generate_all(client, prompts[:24], name)
                assert output == expected[:24], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_seed_decides_whoever_drafts(
    sampling: str, dtype: str, models: dict[str, Path], drafter: ServiceProcess
) -> None:
    """Sampled text is the same for any drafter, in bf16 too; another seed gives another text."""
    prompts = make_prompts(24, seed=1)
    arguments = ["--target", str(models["qwen3"]), "--dtype", dtype]
    options = SAMPLINGS[sampling]
    async with ServiceProcess(
        "verifier", arguments, environment={"OMP_NUM_THREADS": "1"}
    ) as served:
        async with Client(served.address, drafter=drafter.address) as client:
            expected, _ = await generate_all(client, prompts, "none", **options)
            assert len({tuple(output) for output in expected}) == len(prompts)
            for name in (*USEFUL, *HOSTILE):
                output, _ = await generate_all(client, prompts, name, **options)
                assert output == expected, name
            other, _ = await generate_all(client, prompts[::-1], "none", **options)
            assert other[::-1] != expected
