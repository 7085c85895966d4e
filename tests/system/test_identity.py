"""The main promise, through real processes: the same tokens whoever drafts."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from system_support import EAGER, FAMILIES, HOSTILE, THREADS, make_prompts, reference

from paceline.client import Client
from paceline.harness import ServiceProcess

pytestmark = pytest.mark.bits
Verifiers = Callable[[str], ServiceProcess]
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


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_transformers(
    family: str,
    count: int,
    models: dict[str, Path],
    verifiers: Verifiers,
    drafter: ServiceProcess,
) -> None:
    """64 tokens in fp32 for each prompt, no drafter and every drafter, 8 at a time."""
    prompts = make_prompts(count)
    expected = reference(models[family], prompts, TOKENS)
    served = await asyncio.to_thread(verifiers, family)
    async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:
        plain, _ = await generate_all(client, prompts, "none")
        assert plain == expected
        for name in (family, *USEFUL):
            output, accepted = await generate_all(client, prompts, name)
            assert output == expected, name
            # The others are right by luck, which takes many prompts.
            right = accepted > 0 or (name != family and count < 200)
            assert right, f"{name} never guessed right: the test shows nothing"
        few = count // 3
        for name in HOSTILE:
            output, _ = await generate_all(client, prompts[:few], name)
            assert output == expected[:few], name


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def verifier(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[ServiceProcess]:
    """One that weighs drafting, of a dtype."""
    arguments = ["--target", str(models["qwen3"]), "--dtype", request.param]
    with ServiceProcess("verifier", arguments, environment=THREADS) as served:
        yield served


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_seed_decides_whoever_drafts(
    sampling: str, verifier: ServiceProcess, drafter: ServiceProcess
) -> None:
    """Sampled text is the same for any drafter, in bf16 too; another seed gives another text."""
    prompts, few = make_prompts(8, seed=1), 3
    options = SAMPLINGS[sampling]
    async with (
        Client(verifier.address, drafter=drafter.address) as client,
        Client(verifier.address, drafter=drafter.address, drafting=EAGER) as eager,
    ):
        expected, _ = await generate_all(client, prompts, "none", **options)
        assert len({tuple(output) for output in expected}) == len(prompts)
        for name in ("qwen3", *USEFUL):
            output, _ = await generate_all(eager, prompts, name, **options)
            assert output == expected, name
        for name in HOSTILE:
            output, _ = await generate_all(eager, prompts[:few], name, **options)
            assert output == expected[:few], name
        output, _ = await generate_all(client, prompts, "lm", **options)
        assert output == expected, "drafting where it pays"
        other, _ = await generate_all(client, prompts[::-1], "none", **options)
        assert other[::-1] != expected
