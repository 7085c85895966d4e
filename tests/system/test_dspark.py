"""The dspark drafter gets hidden states by shared memory or the wire, and changes no token."""

import asyncio
from pathlib import Path

import pytest
import torch
from system_support import EAGER, FAMILIES, make_prompts

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, GenerationResult
from paceline.dspark import DSparkConfig, DSparkModel, save_dspark
from paceline.longspec import TargetRef

TOKENS = 64


def make_drafter(target: Path, folder: Path) -> Path:
    """A random drafter for a target: its guesses are poor, its way to them is the real one."""
    torch.manual_seed(0)
    config = DSparkConfig.for_target(
        target, taps=(0, 1), block=4, mask_token=2, window=24, markov_rank=8
    )
    weights = DSparkModel(config).state_dict()
    save_dspark(folder, config, weights, TargetRef.of(target), dtype=torch.float32)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_are_those_of_no_drafter(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """12 texts at once, greedy and sampled: a tree, a chain, and a tree from sent states."""
    target = models[family]
    folder = make_drafter(target, tmp_path / "drafter")
    prompts = make_prompts(12, seed=3)
    threads = {"OMP_NUM_THREADS": "1"}
    loads = [
        "--load", f"tree=dspark:{folder},target={target}",
        "--load", f"chain=dspark:{folder},target={target},widths=1",
        "--load", f"far=dspark:{folder},target={target},states=follow",
    ]  # fmt: skip
    with (
        ServiceProcess("verifier", ["--target", str(target)], environment=threads) as served,
        ServiceProcess("drafter", loads, environment=threads) as drafter,
    ):
        async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:

            async def generate(name: str, temperature: float) -> list[GenerationResult]:
                runs = (
                    client.generate(
                        prompt,
                        max_new_tokens=TOKENS,
                        temperature=temperature,
                        seed=seed,
                        drafter=name,
                        ignore_eos=True,
                    )
                    for seed, prompt in enumerate(prompts)
                )
                return await asyncio.gather(*runs)

            for temperature, names in ((0.0, ("tree", "far")), (1.0, ("chain", "far"))):
                plain = await generate("none", temperature)
                for name in names:
                    drafted = await generate(name, temperature)
                    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
                    assert any(r.stats.drafted for r in drafted), "the drafter was never asked"
                    received = sum(e.kv_bytes for r in drafted for e in r.stats.rounds)
                    assert (received > 0) == (name == "far")
                    reasons = {reason for r in drafted for reason in r.stats.fallbacks}
                    assert reasons <= {"drafter_timeout"}  # a busy machine may make it late
