"""A decoder without a model: the KV of a token is a hash of the text up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoder import DecoderConfig, ForwardResult, KVCacheView
from paceline.drafter.methods.base import Fit
from paceline.drafter.methods.lm.drafter import LmDrafter, LmOptions, LmSequence
from paceline.drafter.methods.options import parse_options
from paceline.kernels import TreePlan

from .models import VOCAB

_MODULUS = 1 << 20  # exact in float32


@dataclass
class HashingDecoder:
    """The part of a decoder that the drafter uses."""

    config: DecoderConfig
    device: str = "cpu"

    def forward(
        self,
        tokens: Tensor,
        plan: TreePlan,
        caches: Sequence[KVCacheView],
        *,
        logit_rows: Tensor,
        observer: None = None,
    ) -> ForwardResult:
        rows: list[float] = []
        for segment, first in zip(plan.segments, plan.offsets, strict=False):
            keys, values = caches[segment.sequence].layer(0)
            before = float(keys[0, segment.start - 1, 0]) if segment.start else 0.0
            parents = segment.parents or tuple(range(-1, segment.length - 1))
            hashes: list[float] = []
            for node, parent in enumerate(parents):
                above = before if parent < 0 else hashes[parent]
                hashes.append(_next(above, int(tokens[first + node])))
            block = torch.tensor(hashes)
            keys[0, segment.start : segment.stop, 0] = block
            values[0, segment.start : segment.stop, 0] = -block
            rows += hashes
        seen = torch.tensor(rows)[logit_rows]
        return ForwardResult(torch.sin(seen[:, None] * torch.arange(1, VOCAB + 1)) * 3)


def hashing_drafter(**options: str) -> LmDrafter:
    """The method `lm` over a hashing decoder."""
    config = DecoderConfig(
        model_type="hashing", layers=1, hidden=1, intermediate=1, q_heads=1, kv_heads=1,
        head_dim=1, vocab_size=VOCAB, max_position=1 << 20, norm_eps=1.0, rope_inv_freq=(),
        rope_scaling=1.0, windows=(None,), qkv_bias=False, o_bias=False, mlp_bias=False,
        qk_norm=False, tied=True, eos_token_ids=(), bos_token_id=None, dtype=torch.float32,
    )  # fmt: skip
    decoder = HashingDecoder(config)
    return LmDrafter(decoder, parse_options(LmOptions, options), Fit(), 0)  # type: ignore[arg-type]


def check_hashes(sequence: LmSequence) -> None:
    """The cache holds the hashes of the text that it contains."""
    expected: list[float] = []
    above = 0.0
    for token in sequence.text[: sequence.cached]:
        above = _next(above, token)
        expected.append(above)
    keys, values = sequence.cache.layer(0)
    assert keys[0, : sequence.cached, 0].tolist() == expected
    assert (-values[0, : sequence.cached, 0]).tolist() == expected


def _next(above: float, token: int) -> float:
    return float((int(above) * 31 + token * 7919 + 1) % _MODULUS)
