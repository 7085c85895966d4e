"""Selection policies between services: of another package, and behind sliding windows."""

import asyncio
import sys
from pathlib import Path

from system_support import EAGER, THREADS, generate_all, ids_of, make_prompts, reference

from paceline.client import Client
from paceline.harness import local_services

sys.path.insert(0, str(Path(__file__).parent.parent / "kv"))

from other_package import install

TOKENS = 24


async def test_a_policy_of_another_package(models: dict[str, Path], tmp_path: Path) -> None:
    """The drafter finds it by its entry point, and the verifier runs it, mapped and followed."""
    install(tmp_path, "newest")
    environment = {**THREADS, "PYTHONPATH": str(tmp_path)}
    target = models["llama"]
    loads = [
        f"--load={kv}=selfspec:{target},context=48,kv={kv},kv_policy=newest"
        for kv in ("map", "follow")
    ]
    served = [f"--target={target}", "--weights=float32", "--schedule=off"]
    prompts = [prompt * 3 for prompt in make_prompts(2, seed=2)]
    expected = reference(target, prompts, TOKENS)
    with local_services(served, loads, environment) as (verifier, _):
        async with Client(verifier.address, drafting=EAGER) as client:
            for kv in ("map", "follow"):
                (tmp_path / "pid").unlink(missing_ok=True)
                drafted = False
                async with asyncio.timeout(300):
                    while not drafted:  # a text may end before its drafter has opened it
                        results = await generate_all(client, prompts, kv, TOKENS, ignore_eos=True)
                        assert ids_of(results) == expected
                        drafted = all(result.stats.drafted for result in results)
                assert (tmp_path / "pid").read_text() == str(verifier.pid)


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
