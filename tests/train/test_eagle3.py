"""Training of an EAGLE-3 layer: depths of the training-time test, and its loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter.shapes import randomised

from paceline.drafter.methods.eagle3 import Eagle3Config
from paceline.drafter.methods.mtp import MtpConfig
from paceline.train.modules import Eagle3Model, MtpModel
from paceline.train.unrolled import TrainingRows, Unrolled

CONFIG = Eagle3Config(
    hidden=16, intermediate=24, q_heads=2, kv_heads=1, head_dim=8, vocab_size=90, max_position=512,
    norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, taps=(0, 1, 2),
    target_layers=3, draft_vocab_size=60,
)  # fmt: skip


MTP = MtpConfig(
    hidden=16, intermediate=24, q_heads=2, kv_heads=1, head_dim=8, vocab_size=90, max_position=512,
    norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, taps=(2,),
    target_layers=3,
)  # fmt: skip


def made(config: Eagle3Config | MtpConfig = CONFIG, **change: object) -> Any:
    kind = MtpModel if isinstance(config, MtpConfig) else Eagle3Model
    return randomised(kind(replace(config, **change)))  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("change", [{}, {"norm_output": True}, {"window": 4}, {"config": MTP}])
def test_a_depth_is_what_a_draft_of_this_length_reads(change: dict[str, Any]) -> None:
    model, depths = made(**change), 3
    embedded, states = torch.randn(2, 9, 16), torch.randn(2, 9, model.config.states)
    positions = torch.arange(1, 10).expand(2, -1) + torch.tensor([[0], [5]])
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :2] = False
    found = Unrolled(model)(TrainingRows(embedded, states, positions, real, 6), depths)
    window = model.config.window or 99
    for text in range(2):
        start = int((~real[text]).sum())
        for row in range(3, 9):
            for depth in range(min(depths, row - 2)):
                root = row + 1 - depth  # tokens that are read with states of the target
                span = slice(start, root)
                hidden, past = model.fuse(states[text : text + 1, span]), None
                for stop in range(root, row + 2):
                    places = torch.arange(span.start, stop)
                    apart = places[:, None] - torch.arange(start, stop)
                    seen = (apart >= 0) & (apart < window)
                    out, hidden, new = model(
                        embedded[text : text + 1, span], hidden, positions[text : text + 1, span],
                        seen[None], past,
                    )  # fmt: skip
                    pairs = zip(past or (), new, strict=bool(past))
                    past = tuple(torch.cat(pair, dim=2) for pair in pairs) or new
                    hidden, span = hidden[:, -1:], slice(stop, stop + 1)
                torch.testing.assert_close(found[depth, text, row - 3], out[0, -1])
