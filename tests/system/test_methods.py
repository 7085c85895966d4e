"""Every drafting method, from its own process: it reads the verifier's KV and changes no token."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from system_support import (
    EAGER,
    THREADS,
    generate_all,
    ids_of,
    make_prompts,
    reference,
    wait_joined,
    write_block,
    write_head,
    write_layer,
    write_states,
)
from tiny_models import FAMILIES

from paceline.client import Client
from paceline.harness import ServiceProcess

Verifiers = Callable[[str], ServiceProcess]
Methods = Callable[[str], None]
TOKENS = 24
METHODS = {
    "longspec": "longspec:{layer},target={target},context=20",
    "longspec-followed": "longspec:{layer},target={target},kv=follow,context=40",
    "dspark-tree": "dspark:{block},target={target}",
    "dspark-chain": "dspark:{block},target={target},widths=1",
    "dspark-followed": "dspark:{block},target={target},states=follow",
    "eagle3": "eagle3:{states},target={target}",
    "mtp": "mtp:{head},target={target}",
    "selfspec-mapped": "selfspec:{target},context=48,kv=map",
    "selfspec-chosen": "selfspec:{target},context=48,kv=map,kv_policy=verified",
    "selfspec-pages": "selfspec:{target},context=48,kv=map,kv_policy=verified_pages,widths=2,1",
    "selfspec-streaming": "selfspec:{target},context=48,kv=follow,kv_policy=streaming",
    "selfspec-verified": "selfspec:{target},context=48,kv=follow,kv_policy=verified",
    "selfspec-chunk": "selfspec:{target},context=48,kv=follow,kv_policy=chunk_topk",
    "selfspec-verified-pages": "selfspec:{target},context=48,kv=follow,kv_policy=verified_pages",
}
SHAPES = (
    "longspec",
    "dspark-tree",
    "dspark-followed",
    "eagle3",
    "mtp",
    "selfspec-mapped",
    "selfspec-verified-pages",
)  # methods that are tested with every family's shapes
SAMPLED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": {3: 2.0, 7: -5.0},
}
REFUSALS = {"invalid_tree", "malformed_tree", "drafter_refused"}


def methods_of(family: str) -> Collection[str]:
    """Names of the methods that are tested with a family."""
    return METHODS if family == "llama" else SHAPES


@pytest.fixture(scope="module")
def methods(
    models: dict[str, Path], sockets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Methods]:
    """Starts the drafter service of a family, with its methods."""
    with ExitStack() as running:

        @cache
        def serve(family: str) -> None:
            target, folder = models[family], tmp_path_factory.mktemp(family)
            paths = {
                "target": target,
                "layer": write_layer(target, folder / "layer"),
                "block": write_block(target, folder / "block"),
                "states": write_states(target, folder / "states"),
                "head": write_head(target, folder / "head"),
            }
            loads = [f"{family}-{n}={METHODS[n].format(**paths)}" for n in methods_of(family)]
            given = [f"--load={each}" for each in loads]
            given.append(f"--verifier=unix:{sockets}/{family}")
            running.enter_context(ServiceProcess("drafter", given, environment=THREADS))

        yield serve


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in ("llama", "qwen3") else pytest.mark.slow)
        for each in FAMILIES
    ],
)
async def test_tokens_are_those_of_no_drafter(
    family: str, models: dict[str, Path], verifiers: Verifiers, methods: Methods
) -> None:
    """Greedy and sampled, with texts longer than the layer's context and the KV budgets."""
    prompts = [prompt * 3 for prompt in make_prompts(2, seed=2)]
    greedy = reference(models[family], prompts, TOKENS)
    served = await asyncio.to_thread(verifiers, family)
    await asyncio.to_thread(methods, family)
    await asyncio.to_thread(wait_joined, served.address, name=f"{family}-mtp")
    async with Client(served.address, drafting=EAGER) as client:
        plain = await generate_all(client, prompts, "none", TOKENS, ignore_eos=True, **SAMPLED)
        kv_bytes = {}
        for name in methods_of(family):
            results = [
                await generate_all(
                    client, prompts, f"{family}-{name}", TOKENS, ignore_eos=True, **options
                )
                for options in ({}, SAMPLED)
            ]
            assert [ids_of(each) for each in results] == [greedy, ids_of(plain)], name
            stats = [result.stats for each in results for result in each]
            assert all(s.drafted for s in stats), f"{name} drafted nothing"
            assert not any(s.fallbacks for s in stats), name
            if name.startswith("selfspec"):
                assert sum(s.accepted for s in stats) > 0, name
            kv_bytes[name] = sum(r.kv_bytes for s in stats for r in s.rounds)
    if family != "llama":
        return
    mapped = ("longspec", "dspark-tree", "dspark-chain", "selfspec-mapped")
    assert [kv_bytes[name] for name in mapped] == [0] * 4
    assert kv_bytes["dspark-followed"] > 0 < kv_bytes["longspec-followed"]
    chosen = kv_bytes["selfspec-chosen"]
    assert 0 < chosen < kv_bytes["selfspec-verified"] / 10, "positions without their KV"


async def test_rejection_sampling_with_every_method(
    verifiers: Verifiers, methods: Methods, drafter: ServiceProcess
) -> None:
    """The verifier refuses no chain of a well-behaved method, and serves on with hostile ones."""
    served = await asyncio.to_thread(verifiers, "llama")
    await asyncio.to_thread(methods, "llama")
    prompts = make_prompts(6, seed=5)
    # Few likely tokens, so that texts repeat and prompt lookup finds matches.
    bias = {3: 9.0, 7: 9.0, 11: 9.0}
    options = {"temperature": 0.8, "top_p": 0.95, "logit_bias": bias, "acceptance": "rejection"}
    names = ["llama-dspark-tree", "llama-longspec", "llama-selfspec-mapped"]
    hostile = ["random-tree", "malformed", "failing"]
    for name in ("llama", "llama-mtp"):
        await asyncio.to_thread(wait_joined, served.address, name=name)
    async with Client(served.address, drafting=EAGER) as client:
        for name in (*names, "llama", "ngram", *hostile):
            results = await generate_all(client, prompts, name, 48, ignore_eos=True, **options)
            assert all(len(result.token_ids) == 48 for result in results), name
            if name in hostile:
                continue
            assert any(result.stats.drafted for result in results), name
            reasons = {reason for r in results for reason in r.stats.fallbacks}
            assert not reasons & REFUSALS, name
            if name == "llama":  # drafts with the target itself
                rounds = [e for r in results for e in r.stats.rounds if e.drafted]
                accepted = sum(entry.accepted for entry in rounds)
                assert accepted > 0.8 * sum(entry.drafted for entry in rounds)
