"""Drafter invariance through real processes: the same tokens with any drafter."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from system_support import (
    EAGER,
    HOSTILE,
    generate_all,
    ids_of,
    make_prompts,
    reference,
    wait_joined,
)
from tiny_models import FAMILIES

from paceline.client import Client
from paceline.harness import ServiceProcess

Verifiers = Callable[[str], ServiceProcess]
USEFUL = ("lm", "ngram", "bigram")

TOKENS = 64
SAMPLINGS = {
    "T1": {"temperature": 1.0},
    "filtered": {
        "temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 2.0, 7: -5.0, 11: 1.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_transformers(
    family: str, count: int, models: dict[str, Path], verifiers: Verifiers, drafter: ServiceProcess
) -> None:
    """64 tokens in fp32 for each prompt, no drafter and every drafter, 8 at a time."""
    prompts = make_prompts(count)
    expected = reference(models[family], prompts, TOKENS)
    served = await asyncio.to_thread(verifiers, family)
    await asyncio.to_thread(wait_joined, served.address, name=family)
    async with Client(served.address, drafting=EAGER) as client:
        assert ids_of(await generate_all(client, prompts, "none", TOKENS)) == expected
        for name in (family, *USEFUL):
            results = await generate_all(client, prompts, name, TOKENS)
            assert ids_of(results) == expected, name
            # Drafts of another model are right by chance, which takes many prompts.
            accepted = sum(result.stats.accepted for result in results)
            assert accepted > 0 or (name != family and count < 200), f"{name}: nothing accepted"
        few = count // 3
        for name in HOSTILE:
            results = await generate_all(client, prompts[:few], name, TOKENS)
            assert ids_of(results) == expected[:few], name


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def verifier(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    sockets: Path,
    environment: dict[str, str],
    drafter: ServiceProcess,
) -> Iterator[ServiceProcess]:
    arguments = ["--target", str(models["qwen3"]), "--weights", request.param]
    address = f"unix:{sockets}/scheduling"
    with ServiceProcess("verifier", arguments, address=address, environment=environment) as served:
        wait_joined(address)
        yield served


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_the_seed_determines_the_text(sampling: str, verifier: ServiceProcess) -> None:
    """With any drafter, in bf16 too; another seed gives another text."""
    prompts, few = make_prompts(8, seed=1), 3
    options = SAMPLINGS[sampling]
    async with (
        Client(verifier.address) as client,
        Client(verifier.address, drafting=EAGER) as eager,
    ):
        expected = ids_of(await generate_all(client, prompts, "none", TOKENS, **options))
        assert len({tuple(output) for output in expected}) == len(prompts)
        for name in ("qwen3", *USEFUL):
            results = await generate_all(eager, prompts, name, TOKENS, **options)
            assert ids_of(results) == expected, name
        for name in HOSTILE:
            results = await generate_all(eager, prompts[:few], name, TOKENS, **options)
            assert ids_of(results) == expected[:few], name
        results = await generate_all(client, prompts, "lm", TOKENS, **options)
        assert ids_of(results) == expected, "drafting where it pays"
        results = await generate_all(client, prompts[::-1], "none", TOKENS, **options)
        assert ids_of(results)[::-1] != expected, "other seeds"
