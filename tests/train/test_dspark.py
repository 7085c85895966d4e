"""Training of a DSpark drafter: packing and loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoder import load_config
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.train.dspark.blocks import Blocks
from paceline.train.dspark.objective import weighted_loss
from paceline.train.dspark.preset import DSparkPreset
from paceline.train.dspark.target import TappedTarget

CONFIG = DSparkConfig(
    hidden=16, intermediate=24, layers=1, q_heads=2, kv_heads=1, head_dim=8, vocab_size=90,
    max_position=512, norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    taps=(0, 1), target_layers=3, block=4, mask_token=0, markov_rank=4, confidence=True,
    confidence_markov=True,
)  # fmt: skip
SMALL = DSparkPreset(
    taps=(0, -1), layers=1, block=3, markov_rank=8, minutes=60, steps=40, rows=2, length=48,
    anchors=12, muon_rate=0.02, adamw_rate=1e-2, window=16, own_texts=4, own_from=0.5, files=4,
)  # fmt: skip


@given(
    rows=st.integers(1, 3), length=st.integers(6, 40), window=st.sampled_from([0, 1, 5, 64]),
    count=st.integers(1, 60), seed=st.integers(0, 99), from_anchor=st.booleans(),
)  # fmt: skip
def test_blocks_are_whole_and_see_what_is_before_them(
    rows: int, length: int, window: int, count: int, seed: int, from_anchor: bool
) -> None:
    config = replace(CONFIG, window=window, from_anchor=from_anchor)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 9, (rows, length))  # 0 ends texts
    blocks = Blocks.draw(config, tokens, count, separator=0)
    if blocks is None:
        return
    flat = tokens.flatten()
    for n, anchor in enumerate(blocks.anchors.tolist()):
        row = int(blocks.target[n, 0]) // length
        text = tokens[row]
        assert anchor >= 1
        inside = text[anchor : anchor + config.levels + 1]
        assert len(inside) == config.levels + 1
        assert (inside[:-1] != 0).all()  # the last may end the text
        assert blocks.fed[n].tolist() == [int(text[anchor])] + [0] * (config.block - 1)
        assert torch.equal(blocks.before[n], inside[:-1])
        assert torch.equal(blocks.labels[n], inside[1:])
        assert torch.equal(flat[blocks.target[n]], inside[:-1])
        seen = blocks.used[blocks.seen[n][blocks.seen[n] >= 0]]
        begin = max(0, anchor - window) if window else 0
        assert sorted(seen.tolist()) == [row * length + p for p in range(begin, anchor)]
    pairs = list(zip(blocks.target[:, 0].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) <= rows * count


def test_cost_does_not_grow_with_the_text() -> None:
    """With a window: as many positions seen and used of 4,000 tokens as of 100."""
    config = replace(CONFIG, window=8)
    for length in (100, 4000):
        blocks = Blocks.at(
            config, torch.ones(1, length).long(), torch.zeros(3).long(), torch.tensor([20, 40, 60])
        )
        assert blocks.seen.shape == (3, 8)
        assert blocks.used.shape == (24,)


def test_the_loss_by_hand() -> None:
    preset = replace(SMALL, ce=0.1, tv=0.9, certainty=1.0)
    torch.manual_seed(0)
    draft, target = (torch.randn(2, 3, 5).log_softmax(-1) for _ in range(2))
    wanted, confidence = torch.randint(0, 5, (2, 3)), torch.randn(2, 3)
    expected = 0.0
    for block in range(2):
        for place in range(3):
            weight = torch.exp(torch.tensor(-place / 3))
            distance = (draft[block, place].exp() - target[block, place].exp()).abs().sum()
            label, said = 1 - distance / 2, confidence[block, place].sigmoid()
            entropy = -(label * said.log() + (1 - label) * (1 - said).log())
            loss = -0.1 * draft[block, place, wanted[block, place]] + 0.9 * distance + entropy
            expected += float(weight * loss) / 2
    assert float(weighted_loss(draft, target, wanted, confidence, preset)) == pytest.approx(
        expected
    )


def test_the_confidence_trains_the_backbone_but_not_its_label() -> None:
    preset = replace(SMALL, ce=0.0, tv=0.0)
    draft = torch.zeros(1, 2, 5, requires_grad=True)
    confidence = torch.zeros(1, 2, requires_grad=True)
    target = torch.randn(1, 2, 5).log_softmax(-1)
    loss = weighted_loss(
        draft.log_softmax(-1), target, torch.zeros(1, 2).long(), confidence, preset
    )
    loss.backward()
    assert confidence.grad is not None
    assert confidence.grad.abs().min() > 0
    assert draft.grad is None or not draft.grad.any()


def test_the_target_reads_as_a_verifier_would(target: Path) -> None:
    """Rows by themselves, longer than a chunk, and logits only where they are wanted."""
    reader = TappedTarget(target, "cpu", [0, 1])
    tokens = torch.randint(1, 300, (2, 300))
    places = torch.tensor([5, 299, 300, 455])
    taps, logits = reader.read(tokens, places)
    assert taps.shape == (600, 2 * load_config(target).hidden)
    assert logits.shape == (4, 320)
    alone, own = reader.read(tokens[1:, :156], torch.tensor([0, 155]))
    assert torch.equal(alone, taps[300:456])
    assert torch.equal(own, logits[2:])
