"""Shapes of small drafters, and random parameters."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from paceline.drafter.methods.dspark import DSparkConfig
from paceline.drafter.methods.eagle3 import Eagle3Config
from paceline.drafter.methods.longspec import LongSpecConfig

Model = TypeVar("Model", bound=nn.Module)

DSPARK = DSparkConfig(
    hidden=24, intermediate=40, layers=2, q_heads=6, kv_heads=2, head_dim=8, vocab_size=50,
    max_position=4096, norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    taps=(0, 2), target_layers=4, block=4, mask_token=7, markov_rank=6, confidence=True,
    confidence_markov=True,
)  # fmt: skip
LONGSPEC = LongSpecConfig(
    hidden=24, intermediate=40, q_heads=6, kv_heads=2, head_dim=8, vocab_size=50, max_position=4096,
    norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, target_layer=2,
    target_layers=3, window=5,
)  # fmt: skip
EAGLE3 = Eagle3Config(
    hidden=24, intermediate=40, q_heads=6, kv_heads=2, head_dim=8, vocab_size=50, max_position=4096,
    norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, taps=(1, 3, 4),
    target_layers=8,
)  # fmt: skip


def randomised(model: Model) -> Model:
    """The model with random parameters, the same each time."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return model
