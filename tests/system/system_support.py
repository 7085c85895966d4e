"""Random drafters, prompts, generations and reference outputs for tests with real processes."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from calls import eventually
from drafter.models import write_drafter
from tiny_models import VOCABULARY
from transformers import AutoModelForCausalLM

from paceline.bench.services import kv_segments
from paceline.client import Client, DraftOptions, GenerationResult
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

THREADS = {"OMP_NUM_THREADS": "1"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "longspec": {"window": 24},
    "dspark": {"mask_token": 2, "window": 24, "markov_rank": 8},
    "eagle3": {},
    "mtp": {},
}  # methods with weights, and fields of their tiny drafters
# Drafts in every round, on any machine, for tests of drafting.
EAGER = DraftOptions(timeout=60, adaptive=False)
HOSTILE = (
    *("random-tree", "always-wrong", "duplicates", "huge", "changing", "malformed", "failing"),
)  # drafting methods that must not matter, of tests/drafter/drafting_methods.py


async def generate_all(
    client: Client, prompts: Sequence[list[int]], drafter: str, tokens: int, **options: Any
) -> list[GenerationResult]:
    """Generate after all prompts, 8 at a time; the seed of a prompt is its index."""
    slots = asyncio.Semaphore(8)

    async def one(index: int, prompt: list[int]) -> GenerationResult:
        async with slots:
            return await client.generate(
                prompt, max_new_tokens=tokens, drafter=drafter, seed=index, **options
            )

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


async def generate_and(
    client: Client,
    prompt: Sequence[int],
    drafter: str,
    tokens: int,
    act: Callable[[], None] | None = None,
    seed: int = 3,
) -> GenerationResult:
    """Generate at temperature 1, of a client with few `unread_chunks`.

    `act` (blocking) runs in a thread after the first drafted round, while the generation waits for
    its reader.
    """
    generation = client.generate(
        list(prompt), max_new_tokens=tokens, temperature=1.0, seed=seed, drafter=drafter,
        ignore_eos=True,
    )  # fmt: skip
    async for _ in generation:
        if act is not None and generation.stats.drafted_rounds:
            await asyncio.to_thread(act)
            act = None
        elif act is not None:
            await asyncio.sleep(0.2)  # the generation waits meanwhile
    assert act is None, "nothing was drafted"
    return await generation


def ids_of(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 4 to 60 random tokens; every other one repeats itself, for n-gram matches."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: tuple[int, ...]) -> Any:
        return torch.randint(low, high, size, generator=generator)

    prompts = []
    for index in range(count):
        text = draw(0, VOCABULARY, (int(draw(4, 31, (1,))),)).tolist()
        prompts.append(text + text[: len(text) // 2] if index % 2 else text)
    return prompts


def reference(folder: Path, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Outputs of transformers' greedy generate, one prompt at a time, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
            outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def write_drafters(target: Path, folder: Path) -> dict[str, Path]:
    """Drafters of random weights: their drafts are poor, their reads of the KV are real."""
    return {
        method: write_drafter(method, folder / method, target, **fields)
        for method, fields in DRAFTERS.items()
    }


def wait_joined(address: str, count: int = 1, name: str = "") -> list[verifier_pb2.JoinedService]:
    """The drafter services of a verifier, once there are so many, or one has a drafter of this
    name. Blocking."""
    request = verifier_pb2.GetModelRequest(omit_tokenizer=True)
    joined: list[verifier_pb2.JoinedService] = []
    with grpc.insecure_channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)

        def there() -> bool:
            joined[:] = stub.GetModel(request, wait_for_ready=True).drafter_services
            names = {info.name for service in joined for info in service.drafters}
            return name in names if name else len(joined) == count

        eventually(there, f"{name or count} has joined")
    return joined


SPAWNED: set[int] = set()  # process ids of all services that these tests started


def open_segments(*pids: int) -> set[tuple[int, str]]:
    """Descriptors of KV segments in processes, by default in all that these tests started."""
    return {(pid, each) for pid in pids or SPAWNED for each in kv_segments(pid)}
