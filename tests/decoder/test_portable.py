"""Texts with their log-probabilities, recorded once: every processor gives the same bits.

Where a digest differs, the arithmetic of the processor, or a change of the code, gives other bits.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch

from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import (
    History,
    QueryBlock,
    SamplingRules,
    choose_token,
    gumbel_noise_at,
    plan_trees,
    raw_logprobs,
)

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
PROMPT = [int(token) for token in (torch.arange(300) * 37 + 11) % 4000]
TOKENS = 24
DIGESTS = json.loads(Path(__file__).with_suffix(".json").read_text())


def generate(decoder: Decoder, sampling: SamplingRules) -> str:
    """SHA-256 of the tokens and log-probabilities of a text."""
    cache, digest, tokens = LocalCache(decoder.config), hashlib.sha256(), list(PROMPT)
    for _ in range(TOKENS):
        new = tokens[len(cache) :]
        while new:
            block, new = new[:256], new[256:]
            cache.reserve(len(block))
            plan = plan_trees([QueryBlock(0, len(cache), None, len(block))])
            last = torch.tensor([len(block) - 1])
            result = decoder.forward(torch.tensor(block), plan, [cache], logit_rows=last)
            cache.commit(range(len(block)))
        logits = result.logits[0]
        tokens.append(choose_token(logits, sampling, len(tokens), History(tokens)))
        logprob, top = raw_logprobs(logits, tokens[-1], 5)
        digest.update(struct.pack("<idi", tokens[-1], logprob, len(top)))
        for token, value in top:
            digest.update(struct.pack("<id", token, value))
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4", "bfloat16, int8 KV"])
def test_texts_have_the_recorded_bits(name: str) -> None:
    weights, _, kv = name.partition(", ")
    decoder = load_decoder(TARGET, weights, kv_cache_dtype=kv.removesuffix(" KV") or "auto")
    found = {
        "greedy": generate(decoder, SamplingRules(temperature=0.0)),
        "sampled": generate(decoder, SamplingRules(temperature=0.8, top_p=0.9, seed=7)),
    }
    assert found == DIGESTS[name]


def test_noise_has_the_recorded_bits() -> None:
    noise = torch.cat([gumbel_noise_at(seed, 5 * seed, torch.arange(5000)) for seed in range(20)])
    assert hashlib.sha256(noise.numpy().tobytes()).hexdigest() == DIGESTS["noise"]
