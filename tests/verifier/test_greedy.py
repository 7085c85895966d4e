"""Greedy output is token for token what transformers generates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from verifier_support import FAMILIES, VOCAB, Tree, serving


def reference(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers' generate emits, end-of-sequence ignored."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def nothing(text: list[int], rng: random.Random) -> Tree:
    return [], []


@pytest.mark.parametrize("family", FAMILIES)
async def test_equals_transformers(family: str, models: Any, tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    expected = reference(models[family], prompts, 24)
    async with serving(models[family], tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        for prompt, tokens in zip(prompts, expected, strict=True):
            got = await client.generate(prompt, nothing, max_new_tokens=24, ignore_eos=True)
            assert got == tokens
