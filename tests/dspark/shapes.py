"""A small DSpark drafter."""

from __future__ import annotations

import torch

from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel

CONFIG = DSparkConfig(
    hidden=24, intermediate=40, layers=2, q_heads=6, kv_heads=2, head_dim=8, vocab_size=50,
    max_position=4096, norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    taps=(0, 2), target_layers=4, block=4, mask_token=7, markov_rank=6, confidence=True,
    confidence_markov=True,
)  # fmt: skip


def make(config: DSparkConfig) -> DSparkModel:
    torch.manual_seed(0)
    model = DSparkModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return model
