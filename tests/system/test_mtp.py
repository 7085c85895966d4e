"""Heads in a target's own files, from processes of their own: no token changes."""

from pathlib import Path

import pytest
from drafter.models import VOCAB
from drafter.mtp_heads import write_target
from system_support import EAGER, THREADS, generate_all, ids_of, make_prompts

from paceline.client import Client
from paceline.harness import local_services

TOKENS = 24
SAMPLED = {"temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize(
    "name", ["Qwen3.5, two heads", pytest.param("MiMo", marks=pytest.mark.slow)]
)
async def test_tokens_are_those_of_no_drafter(name: str, tmp_path: Path) -> None:
    """A target with recurrent states, and one of a family that transformers does not have."""
    target = write_target(tmp_path / "target", name)
    prompts = [[token % VOCAB for token in prompt] for prompt in make_prompts(6, seed=4)]
    arguments = ["--target", str(target), "--weights", "float32", "--schedule", "off"]
    with local_services(arguments, [f"--load=mtp,target={target}"], THREADS) as (served, _):
        async with Client(served.address, drafting=EAGER) as client:
            for options in ({}, SAMPLED):
                texts = [
                    await generate_all(client, prompts, each, TOKENS, ignore_eos=True, **options)
                    for each in ("none", "mtp")
                ]
                assert ids_of(texts[0]) == ids_of(texts[1])
                stats = [result.stats for result in texts[1]]
                assert all(each.drafted for each in stats)
                assert not any(each.fallbacks for each in stats)
