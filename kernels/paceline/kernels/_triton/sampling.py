"""Sampling of many rows on the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels._triton.jit.sampling import choose_rows

if TYPE_CHECKING:
    from paceline.kernels.sampling import SamplingParams

_BLOCK = 1024


def choose(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """See :func:`paceline.kernels.choose_tokens`; no row may have penalties."""
    wrapped = [(p.seed - (1 << 64) if p.seed >> 63 else p.seed) for p in params]
    integers = [
        (seed, position, each.top_k)
        for seed, position, each in zip(wrapped, positions, params, strict=True)
    ]
    floats = [
        (each.temperature, math.log(each.min_p) if each.min_p else -math.inf, each.top_p)
        for each in params
    ]
    device = logits.device
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    choose_rows[(len(params),)](
        logits, tokens, torch.tensor(integers, dtype=torch.int64).to(device),
        torch.tensor(floats, dtype=torch.float64).to(device),
        logits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    found: list[int] = tokens.tolist()
    return found
