"""The distribution in both modes of acceptance; determinism and refusals of REJECTION."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import FALSE_ALARM, p_value
from verifier_support import PROMPT, VOCAB, Client

from paceline.convert import load_decoder
from paceline.decoder import LocalCache
from paceline.kernels import History, Proposal, QueryBlock, SamplingRules, filter_logits, plan_trees
from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2, tree_pb2

CHOICES, SAMPLES, AT_ONCE = 3, 300, 20


def rejection(seed: int, **fields: Any) -> sampling_pb2.SamplingParams:
    fields = {"mode": sampling_pb2.ACCEPTANCE_MODE_REJECTION, **fields}
    return sampling_pb2.SamplingParams(temperature=1.0, seed=seed, **fields)


def proposal_for(text: Sequence[int]) -> Proposal:
    """Any function of the text: often far from the target's opinion."""
    draws = np.random.default_rng(list(text))
    weights = draws.random(VOCAB).astype(np.float32) ** 8
    return Proposal.checked(range(VOCAB), (weights / weights.sum()).tolist())


def drawn_chain(text: Sequence[int], seed: int, depth: int) -> tree_pb2.TokenTree:
    path = list(text)
    tree = tree_pb2.TokenTree(parents=range(-1, depth - 1))
    for _ in range(depth):
        proposal = proposal_for(path)
        path.append(proposal.draw(seed, len(path)))
        tree.tokens.append(path[-1])
        tree.distributions.add(
            tokens=proposal.tokens.tolist(), probabilities=proposal.probabilities.tolist()
        )
    return tree


async def generate(client: Client, seed: int, tokens: int, **fields: Any) -> tuple[int, ...]:
    """By rejection unless the fields say otherwise."""

    def draw(text: list[int], _: Any) -> tree_pb2.TokenTree:
        tree = drawn_chain(text, seed, 3)
        if sampling.mode != sampling_pb2.ACCEPTANCE_MODE_REJECTION:
            tree.ClearField("distributions")
        return tree

    sampling = rejection(seed, **fields)
    output = await client.generate(
        PROMPT, draw, max_new_tokens=tokens, ignore_eos=True, sampling=sampling
    )
    return tuple(output)


def chances(model: Path, tokens: int, top_k: int) -> dict[tuple[int, ...], float]:
    """Of all outcomes, by the target alone."""
    decoder = load_decoder(model)
    params = SamplingRules(top_k=top_k)

    def following(text: list[int]) -> dict[int, float]:
        cache = LocalCache(decoder.config)
        cache.reserve(len(text))
        plan = plan_trees([QueryBlock(0, 0, None, len(text))])
        logits = decoder.forward(torch.tensor(text), plan, [cache], logit_rows=None).logits[-1]
        odds = filter_logits(logits, params, History(text)).double().softmax(0)
        return {token: float(odds[token]) for token in odds.nonzero().flatten().tolist()}

    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        paths = {
            (*path, token): chance * more
            for path, chance in paths.items()
            for token, more in following([*PROMPT, *path]).items()
        }
    return paths


@pytest.mark.parametrize("mode", ["REJECTION", "INVARIANT"])
async def test_the_distribution_is_the_targets(mode: str, client: Client, model: Path) -> None:
    """Three tokens, the second and third drafted for; per position and jointly."""
    chosen = sampling_pb2.AcceptanceMode.Value(f"ACCEPTANCE_MODE_{mode}")
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> tuple[int, ...]:
        async with slots:
            return await generate(client, seed, 4, top_k=CHOICES, mode=chosen)

    found = [path[:3] for path in await asyncio.gather(*map(one, range(SAMPLES)))]
    expected = chances(model, 3, CHOICES)
    assert len(expected) == CHOICES**3
    assert p_value(found, expected) > FALSE_ALARM
    for place in range(3):
        alone: dict[int, float] = {}
        for path, chance in expected.items():
            alone[path[place]] = alone.get(path[place], 0.0) + chance
        assert p_value([path[place] for path in found], alone) > FALSE_ALARM


async def test_the_same_drafts_give_the_same_text(client: Client) -> None:
    """Nothing but the drafts, the seed and the target decides."""
    first = await generate(client, 9, 40)
    assert await generate(client, 9, 40) == first
    assert await generate(client, 10, 40) != first


async def test_certainties_need_no_distribution(client: Client) -> None:
    """Accepted nodes are reported as for any tree."""
    for seed in range(20):
        created = await client.create(
            PROMPT, max_new_tokens=9, ignore_eos=True, sampling=rejection(seed, top_k=2)
        )
        plain = await client.create(PROMPT, max_new_tokens=9, ignore_eos=True)
        likely = list(plain.first.tokens)
        name = await client.drafter_service.add(lambda *_: TokenTree.chain(likely * 2))  # noqa: B023
        (answer,) = await client.steps(created.handle, 1, drafter=name)
        client.drafter_service.remove(name)
        result = answer.result
        accepted = list(result.accepted_nodes)
        assert accepted == list(range(len(result.tokens) - 1))
        assert list(result.tokens)[: len(accepted)] == (likely * 2)[: len(accepted)]
        await client.release(created.handle)
        await client.release(plain.handle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tree: tree.parents.__setitem__(2, 0), "BAD_TREE"),
        (lambda tree: tree.distributions[1].Clear(), "BAD_DISTRIBUTION"),
        (lambda tree: tree.tokens.__setitem__(1, (tree.tokens[1] + 1) % VOCAB), "NOT_A_SAMPLE"),
    ],
)
async def test_malformed_proposals_are_refused(client: Client, change: Any, reason: str) -> None:
    """The step goes on without them."""

    def malformed(text: list[int], _: Any) -> tree_pb2.TokenTree:
        tree = drawn_chain(text, 5, 3)
        change(tree)
        return tree

    name = await client.drafter_service.add(malformed)
    created = await client.create(PROMPT, max_new_tokens=30, ignore_eos=True, sampling=rejection(5))
    (answer,) = await client.steps(created.handle, 1, drafter=name)
    assert list(answer.fallbacks) == ["invalid_tree"]
    assert reason in answer.fallback_message
    assert (len(answer.tree.tokens), len(answer.result.tokens)) == (0, 1)


async def test_at_temperature_0_both_modes_are_one(client: Client) -> None:
    plain = await client.create(PROMPT, max_new_tokens=2, ignore_eos=True)
    greedy = sampling_pb2.SamplingParams(mode=sampling_pb2.ACCEPTANCE_MODE_REJECTION)
    created = await client.create(PROMPT, max_new_tokens=9, ignore_eos=True, sampling=greedy)
    assert created.first.tokens == plain.first.tokens
    name = await client.drafter_service.add(lambda *_: TokenTree((1, 2), (-1, -1)))
    (answer,) = await client.steps(created.handle, 1, drafter=name)
    assert answer.checked_nodes == 2
