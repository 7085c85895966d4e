"""Every drafting method, from its own process: it reads the verifier's KV and changes no token. So
do heads in the target's own files, and a selection policy of another package."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from drafter.models import VOCAB
from system_support import (
    EAGER,
    THREADS,
    generate_all,
    ids_of,
    make_prompts,
    reference,
    wait_joined,
    write_drafters,
)
from tiny_models import FAMILIES

from paceline.client import Client
from paceline.harness import ServiceProcess, local_services

Verifiers = Callable[[str], ServiceProcess]
Methods = Callable[[str], None]
TOKENS = 24
METHODS = {
    "longspec": "longspec:{longspec},target={target},context=20",
    "longspec-followed": "longspec:{longspec},target={target},kv=follow,context=40",
    "dspark-tree": "dspark:{dspark},target={target}",
    "dspark-chain": "dspark:{dspark},target={target},widths=1",
    "dspark-followed": "dspark:{dspark},target={target},states=follow",
    "eagle3": "eagle3:{eagle3},target={target}",
    "mtp": "mtp:{mtp},target={target}",
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
            target = models[family]
            drafters = write_drafters(target, tmp_path_factory.mktemp(family))
            paths = {"target": target, **drafters}
            loads = [f"{family}-{n}={METHODS[n].format(**paths)}" for n in methods_of(family)]
            given = [f"--load={each}" for each in loads]
            given.append(f"--verifier=unix:{sockets}/{family}")
            running.enter_context(ServiceProcess("drafter", given, environment=THREADS))

        yield serve


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "llama" else pytest.mark.slow) for each in FAMILIES],
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


async def test_tokens_with_the_target_s_own_heads(
    verifiers: Verifiers, drafter: ServiceProcess
) -> None:
    """Of a target with recurrent states."""
    prompts = [[token % VOCAB for token in prompt] for prompt in make_prompts(6, seed=4)]
    served = await asyncio.to_thread(verifiers, "heads")
    await asyncio.to_thread(wait_joined, served.address, name="heads")
    async with Client(served.address, drafting=EAGER) as client:
        for options in ({}, {"temperature": 0.7, "top_p": 0.9}):
            plain, drafted = [
                await generate_all(client, prompts, name, TOKENS, ignore_eos=True, **options)
                for name in ("none", "heads")
            ]
            assert ids_of(drafted) == ids_of(plain)
            assert all(r.stats.drafted and not r.stats.fallbacks for r in drafted)


async def test_a_policy_of_another_package(
    models: dict[str, Path], policy: Path, verifiers: Verifiers, drafter: ServiceProcess
) -> None:
    """The drafter finds it by its entry point, and the verifier runs it, mapped and followed."""
    prompts = [prompt * 3 for prompt in make_prompts(2, seed=2)]
    expected = reference(models["llama"], prompts, TOKENS)
    served = await asyncio.to_thread(verifiers, "llama")
    await asyncio.to_thread(wait_joined, served.address, name="newest-map")
    async with Client(served.address, drafting=EAGER) as client:
        for name in ("newest-map", "newest-follow"):
            (policy / "pid").unlink(missing_ok=True)
            drafted = False
            async with asyncio.timeout(300):
                while not drafted:  # a text may end before its drafter has opened it
                    results = await generate_all(client, prompts, name, TOKENS, ignore_eos=True)
                    assert ids_of(results) == expected
                    drafted = all(result.stats.drafted for result in results)
            assert (policy / "pid").read_text() == str(served.pid)


@pytest.mark.slow
async def test_a_copy_of_a_target_with_windows_drafts_what_it_says(models: dict[str, Path]) -> None:
    """Under a budget of a window, whatever the policy and wherever the KV lies."""
    target = models["mistral"]
    loads = [
        f"--load={kv}-{policy}=selfspec:{target},weights=float32,context=48,depth=4,"
        f"min_survival=0,kv={kv},kv_policy={policy}"
        for kv in ("map", "follow")
        for policy in ("streaming", "verified", "chunk_topk")
    ]
    served = [f"--target={target}", "--weights=float32", "--schedule=off", "--sources=none"]
    prompts = [prompt * 3 for prompt in make_prompts(2, seed=3)]
    expected = reference(target, prompts, TOKENS)
    with local_services(served, loads, THREADS) as (verifier, _):
        async with Client(verifier.address, drafting=EAGER) as client:
            for load in loads:
                name = load.removeprefix("--load=").partition("=")[0]
                results = await generate_all(client, prompts, name, TOKENS, ignore_eos=True)
                assert ids_of(results) == expected
                for stats in (result.stats for result in results):
                    assert stats.drafted_rounds, f"{name} drafted nothing"
                    assert stats.accepted == stats.drafted, name
