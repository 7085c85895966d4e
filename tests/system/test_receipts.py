"""Receipts through real processes: equal on all levels and threads of one numerics."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from system_support import EAGER, THREADS, make_prompts

from paceline.cli.main import main
from paceline.client import Client, Receipt
from paceline.harness import ServiceProcess, local_services
from paceline.kernels._compile import levels_here


@pytest.mark.slow
async def test_receipts_are_checked_by_other_processes(
    models: dict[str, Path],
    verifiers: Callable[[str], ServiceProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # At the lowest level with vectors, if there are two, and on two threads, with a drafter.
    target = ["--target", str(models["qwen3"]), "--weights=bfloat16", "--schedule=off"]
    environment = {"PACELINE_CPU_LEVEL": levels_here()[-2:][0], "OMP_NUM_THREADS": "2"}
    load = [f"--load=lm=lm:{models['small']}"]
    with local_services(target, load, environment) as (verifier, _):
        receipts: dict[str, Receipt] = {}
        async with Client(verifier.address, drafting=EAGER) as client:
            for drafter in ("lm", "none"):
                result = await client.generate(
                    make_prompts(1)[0], max_new_tokens=40, temperature=0.9, seed=8, drafter=drafter
                )
                assert bool(result.stats.drafted) == (drafter == "lm")
                assert result.receipt is not None
                receipts[drafter] = result.receipt
        drafted, plain = (receipts[name].to_json() for name in ("lm", "none"))
        assert drafted == {**plain, "drafts": True}
        file = tmp_path / "receipt.json"

        async def check(*arguments: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["check", str(file), *arguments])
            return code, capsys.readouterr().out

        # Of one numerics: the fastest level and one thread, in a process that the command starts.
        file.write_text(receipts["lm"].to_text())
        for name, value in THREADS.items():
            monkeypatch.setenv(name, value)
        here = f"--target={models['qwen3']}"
        assert await check(here) == (0, f"equal: {len(drafted['tokens'])} tokens\n")

        # Of another: the weights are not rounded.
        code, said = await check(f"--verifier-address={verifiers('qwen3').address}")
        assert code == 3
        assert "linear layer: bfloat16, chain of FMAs, here float32, chain of FMAs" in said

        drafted["tokens"][7] += 1
        file.write_text(json.dumps(drafted))
        code, said = await check(f"--verifier-address={verifier.address}")
        changed, right = drafted["tokens"][7], plain["tokens"][7]
        assert (code, said) == (
            1,
            f"different: token 7 is {changed} in the receipt, and {right} here\n",
        )
