"""A real model with a sliding window: long texts are the same with any drafter."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.client import Client, DraftOptions
from paceline.harness import ServiceProcess, local_services

# Gemma 3 270M, whose window is 512 tokens.
MODEL = Path(os.environ.get("PACELINE_REAL", ""), "gemma270.gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not MODEL.is_file(), reason=f"PACELINE_REAL names no folder with {MODEL.name}"
    ),
]

LENGTH = 2000  # tokens of a text, with its prompt
DOCS = Path(__file__).parents[2] / "docs"
# Prompts: a document and its first tokens; and temperatures.
TEXTS = (("sampling", 900, 0.0), ("kv", 1300, 0.7), ("http", 1600, 0.0), ("drafters", 1800, 0.7))
DRAFTERS = {
    "ngram": "ngram",
    "deep": f"lm:{MODEL},widths=2,1,depth=64,max_nodes=65,min_survival=0",
    "int4": f"lm:{MODEL},weights=int4,widths=4,2,depth=24,max_nodes=48,min_survival=0",
    "selfspec": f"selfspec:{MODEL},depth=32,min_survival=0",
}  # trees of siblings beside paths that are deeper than default ones, and chains


@pytest.fixture(scope="module", params=["one at a time", "at once"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ServiceProcess, int]]:
    """A verifier with all drafters, and how many texts are generated at once: on two threads the
    chunks of a single text are divided among them, on one they are not."""
    threads, at_once = ("2", 1) if request.param == "one at a time" else ("1", len(TEXTS))
    verifier = ["--target", str(MODEL), "--schedule", "off", "--threads", threads]
    loads = [word for name, spec in DRAFTERS.items() for word in ("--load", f"{name}={spec}")]
    with local_services([*verifier, "--max-context", str(LENGTH)], loads) as (process, _):
        yield process, at_once


async def test_texts_behind_the_window_are_the_same(served: tuple[ServiceProcess, int]) -> None:
    verifier, at_once = served
    slots = asyncio.Semaphore(at_once)
    eager = DraftOptions(adaptive=False, timeout=60)
    async with Client(verifier.address, drafting=eager, cache_dir=None) as client:
        model = await client.model()
        assert model.facts.batch_invariant
        found: dict[str, list[tuple[list[int], list[float]]]] = {}
        for drafter in ("none", "local", *DRAFTERS):

            async def text(seed: int, drafter: str = drafter) -> tuple[list[int], list[float]]:
                name, count, temperature = TEXTS[seed]
                prompt = model.tokens((DOCS / f"{name}.md").read_text())[:count]
                async with slots:
                    result = await client.generate(
                        prompt, max_new_tokens=LENGTH - count, temperature=temperature, seed=seed,
                        ignore_eos=True, logprobs=1, drafter=drafter, user=drafter,
                    )  # fmt: skip
                assert result.stats.drafted_rounds or drafter in ("none", "local")
                assert result.logprobs is not None
                return result.token_ids, [each.logprob for each in result.logprobs]

            found[drafter] = await asyncio.gather(*map(text, range(len(TEXTS))))
            assert found[drafter] == found["none"], drafter
