"""Tokens do not depend on the drafter, the batch, the chunks of the prefill or a fork."""

import asyncio
import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from calls import remaining, until
from verifier_support import VOCAB, Client, Serve, paused_engine, text

from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2, verifier_pb2

GREEDY: dict[str, Any] = {}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "T=1": {"temperature": 1.0, "seed": 7},
    "penalties": {
        "temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4,
        "frequency_penalty": 0.2, "seed": 2**64 - 1,
    },
    "greedy with penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "filters": {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02, "top_k": 20, "seed": 3},
    "bias": {"temperature": 1.3, "logit_bias": {4: 3.0, 9: -math.inf}, "seed": 11},
}  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "int8 KV": {"kv_cache_dtype": "int8"},
    "float32 KV": {"kv_cache_dtype": "float32"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "pages": {"paged_kv": True, "kv_bytes": 1 << 24},
}


def options_of(kind: str) -> dict[str, Any]:
    return {"kv_bytes": 1 << 28, **OPTIONS.get(kind, {})}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *product(("Llama",), SAMPLINGS),
        *product(("bf16",), ["T=1", "penalties"]),
        *product(("Mistral", "Qwen2", "Qwen3"), ["T=1"]),
        *product(OPTIONS, ["filters"]),
    ],
)
async def test_same_tokens_with_every_drafter(serve: Serve, kind: str, name: str) -> None:
    prompt = text(3, 30)
    fields = {
        "sampling": sampling_pb2.SamplingParams(**SAMPLINGS[name]),
        "max_new_tokens": 60 if kind in ("Llama", "bf16") else 40,
        "ignore_eos": True,
    }
    async with serve(kind, **options_of(kind)) as client:
        plain = await client.generate(prompt, None, **fields)
        assert len(plain) == fields["max_new_tokens"]
        for drafter, draw in drafters.all_of(plain, len(prompt)).items():
            assert await client.generate(prompt, draw, seed=5, **fields) == plain, drafter
        if name == "T=1":
            fields["sampling"].seed += 1
            assert await client.generate(prompt, None, **fields) != plain


async def test_right_trees_are_accepted(client: Client) -> None:
    prompt = text(5, 20)
    plain = await client.generate(prompt, None, max_new_tokens=41, ignore_eos=True)

    def siblings(so_far: list[int], _: random.Random) -> TokenTree:
        """At each depth the right node follows a wrong sibling: nodes 1, 3, 5, ..."""
        start = len(so_far) - len(prompt)
        tokens = [each for t in plain[start : start + 9] for each in ((t + 1) % VOCAB, t)]
        parents = [2 * (node // 2) - 1 for node in range(18)]
        return TokenTree(tuple(tokens), tuple(parents))

    name = await client.drafter_service.add(siblings)
    created = await client.create(prompt, max_new_tokens=41, ignore_eos=True)
    answers = await client.responses(created.handle, drafter=name)
    assert len(answers) == 4
    for number, answer in enumerate(answers):
        start = 1 + number * 10
        assert list(answer.result.accepted_nodes) == list(range(1, 18, 2))
        assert list(answer.result.tokens) == plain[start : start + 10]
        assert answer.batch_tokens == 19
        assert answer.node_budget == 255
        assert answer.verify_us > 0
    assert answers[-1].result.finish_reason == sampling_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("kind", ["Llama", "bf16", "int8 KV", "pages"])
async def test_concurrent_sequences_and_long_prompts(serve: Serve, kind: str) -> None:
    """Alone, and beside seven others with other trees and prefill chunks."""
    rng = random.Random(8)
    prompts = [text(seed, rng.choice((1, 3, 255, 256, 257, 700))) for seed in range(8)]

    def fields(seed: int) -> dict[str, Any]:
        return {
            "sampling": sampling_pb2.SamplingParams(temperature=seed % 2, seed=seed),
            "max_new_tokens": 30,
            "ignore_eos": True,
        }

    async with serve(kind, **options_of(kind)) as client:
        alone = [await client.generate(p, None, **fields(seed)) for seed, p in enumerate(prompts)]
    async with serve(
        kind, **options_of(kind), prefill_token_limit=100, step_token_limit=40
    ) as client:
        draws = [drafters.all_of(alone[seed], len(p))["mixed"] for seed, p in enumerate(prompts)]
        together = await asyncio.gather(
            *(
                client.generate(prompt, draws[seed], seed=seed, **fields(seed))
                for seed, prompt in enumerate(prompts)
            )
        )
    assert together == alone


async def test_decoding_goes_on_beside_a_long_prefill(serve: Serve) -> None:
    async with serve(prefill_token_limit=64) as client:
        short = await client.create([1, 2, 3], max_new_tokens=400, ignore_eos=True)
        (cache,) = client.service.store
        with paused_engine(after=2) as paused:
            request = verifier_pb2.CreateCacheRequest(prompt_tokens=text(1, 1500), max_new_tokens=2)
            long = asyncio.create_task(remaining(client.stub.CreateCache(request)))
            await paused()
            step = asyncio.create_task(client.steps(short.handle, 1))
            await until(lambda: cache.busy)
        (answer,) = await step
        assert answer.batch_tokens == 65, "the step beside a chunk of the prompt"
        *progress, last = await long
        done = [each.progress.prefilled_tokens for each in progress]
        assert done == sorted(done)
        assert {each.progress.total_tokens for each in progress} == {1500}
        assert last.created.prefill_us > 0


@pytest.mark.parametrize("kind", ["Llama", "bf16", "pages"])
async def test_fork(serve: Serve, kind: str) -> None:
    prompt = text(6, 300)
    fields: dict[str, Any] = {
        "sampling": sampling_pb2.SamplingParams(temperature=1.0, seed=4),
        "max_new_tokens": 20,
        "ignore_eos": True,
    }
    async with serve(kind, **options_of(kind)) as client:
        plain = await client.generate(prompt, None, **fields)
        other = [*prompt[:290], *text(7, 50)]
        plain_other = await client.generate(other, None, **fields)

        parent = await client.create(prompt, **fields)
        same = await client.create(prompt, parent_handle=parent.handle, **fields)
        assert same.reused_tokens == 299, "all but the last prompt token, whose logits are needed"
        assert same.first.tokens[0] == plain[0]
        await client.release(same.handle)
        shared = {"parent_handle": parent.handle, **fields}
        scattered = drafters.scattered(plain_other, len(other))
        assert await client.generate(other, scattered, **shared) == plain_other
        fork = await client.create(other, **shared)
        assert fork.reused_tokens == 290
        await client.release(parent.handle)
        assert fork.first.tokens[0] == plain_other[0], "a fork outlives its parent"
        await client.release(fork.handle)
        unlike = await client.create([(prompt[0] + 1) % VOCAB, *prompt[1:]], **fields)
        assert unlike.reused_tokens == 0


async def test_stop_tokens_end_a_generation_inside_a_tree(client: Client) -> None:
    prompt = text(11, 15)
    plain = await client.generate(prompt, None, max_new_tokens=40, ignore_eos=True)
    stop = plain[20]
    expected = plain[: plain.index(stop) + 1]
    for draw in drafters.all_of(plain, len(prompt)).values():
        got = await client.generate(
            prompt, draw, max_new_tokens=40, ignore_eos=True, stop_token_ids=[stop]
        )
        assert got == expected


async def test_eos_ends_unless_ignored(client: Client) -> None:
    bias = sampling_pb2.SamplingParams(logit_bias={0: 1000.0})
    assert await client.generate([5], None, sampling=bias, max_new_tokens=5) == [0]
    tokens = await client.generate([5], None, sampling=bias, max_new_tokens=5, ignore_eos=True)
    assert tokens == [0] * 5


async def test_the_context_ends_a_generation(serve: Serve) -> None:
    async with serve(max_context=64) as client:
        prompt = text(12, 40)
        plain = await client.generate(prompt, None, ignore_eos=True)
        assert len(plain) == 24
        for draw in drafters.all_of(plain, len(prompt)).values():
            assert await client.generate(prompt, draw, ignore_eos=True) == plain


def expected_logprobs(model: Path, tokens: list[int]) -> torch.Tensor:
    """Of all tokens behind each token of a text, by transformers."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return hf(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("tree", [False, True])
async def test_logprobs(tree: bool, client: Client, model: Path) -> None:
    """Of the raw distribution, without temperature and filters."""
    sampling = sampling_pb2.SamplingParams(temperature=0.5, top_k=3, seed=1)
    fields: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 12, "ignore_eos": True}
    prompt = text(13, 10)
    plain = await client.generate(prompt, None, **fields)
    created = await client.create(prompt, top_logprobs=4, **fields)
    name = "none"
    if tree:
        name = await client.drafter_service.add(drafters.right(plain, len(prompt)))
    answers = await client.responses(created.handle, drafter=name)
    results = [created.first, *(each.result for each in answers)]
    assert [token for result in results for token in result.tokens] == plain
    got = [value for result in results for value in result.logprobs]
    top = [entry for result in results for entry in result.top_logprobs]
    expected = expected_logprobs(model, [*prompt, *plain])[len(prompt) - 1 :]
    assert len(got) == len(top) == len(plain)
    for row, token, value, best in zip(expected, plain, got, top, strict=True):
        assert value == pytest.approx(float(row[token]), abs=2e-3)
        assert list(best.tokens) == row.topk(4).indices.tolist()
        assert list(best.logprobs) == pytest.approx(row.topk(4).values.tolist(), abs=2e-3)


@pytest.mark.parametrize("length", [3, 700])
async def test_prompt_logprobs(length: int, client: Client, model: Path) -> None:
    """Of every prompt token but the first, whatever the parts of the prefill and the parent."""
    prompt = text(14, length)
    parent = await client.create(prompt, max_new_tokens=4)
    created = await client.create(
        prompt, max_new_tokens=4, prompt_logprobs=3, parent_handle=parent.handle
    )
    plain = await client.create(prompt, max_new_tokens=4, prompt_logprobs=0)
    assert created.first.tokens == parent.first.tokens
    expected = expected_logprobs(model, prompt)
    assert list(created.prompt_logprobs) == pytest.approx(
        [float(row[token]) for row, token in zip(expected, prompt[1:], strict=True)], abs=2e-3
    )
    assert plain.prompt_logprobs == created.prompt_logprobs
    assert len(plain.top_prompt_logprobs) == 0
    assert len(created.top_prompt_logprobs) == length - 1
    for row, best in zip(expected, created.top_prompt_logprobs, strict=True):
        assert list(best.logprobs) == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
