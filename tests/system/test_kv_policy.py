"""A selection policy of another package, from drafter to verifier."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from system_support import EAGER, THREADS, make_prompts, reference

from paceline.client import Client
from paceline.harness import ServiceProcess

sys.path.insert(0, str(Path(__file__).parent.parent / "kv"))

from other_package import install

TOKENS = 24


@pytest.mark.parametrize("transport", ["map", "follow"])
async def test_a_policy_of_another_package(
    models: dict[str, Path], tmp_path: Path, transport: str
) -> None:
    """The drafter finds it by its entry point, and the verifier runs it."""
    install(tmp_path, "newest")
    environment = {**THREADS, "PYTHONPATH": str(tmp_path)}
    target = models["llama"]
    load = f"--load=own=selfspec:{target},context=48,kv={transport},kv_policy=newest"
    served = [f"--target={target}", "--weights=float32", "--schedule=off"]
    prompts = [prompt * 3 for prompt in make_prompts(2, seed=2)]
    with (
        ServiceProcess("verifier", served, environment=environment) as verifier,
        ServiceProcess("drafter", [load], environment=environment) as drafter,
    ):
        async with Client(
            verifier.address, drafter_address=drafter.address, drafting=EAGER
        ) as client:
            for prompt, expected in zip(prompts, reference(target, prompts, TOKENS), strict=True):
                result = await client.generate(
                    prompt, max_new_tokens=TOKENS, drafter="own", ignore_eos=True
                )
                assert result.token_ids == expected
                assert sum(r.drafted for r in result.stats.rounds) > 0
        assert (tmp_path / "pid").read_text() == str(verifier.pid)
