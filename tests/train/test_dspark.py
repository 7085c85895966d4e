"""Training of a DSpark drafter: packing, loss, and the temperatures of its confidences."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.convert import load_config, load_decoder, open_model
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.kernels.sampling import SamplingRules
from paceline.train.calibration import Chain, fit_temperatures
from paceline.train.dspark import CHUNK, TrainingBlocks, label_weights, weighted_loss, whole_blocks
from paceline.train.own_text import Task, write_texts
from paceline.train.recipes.dspark import DSparkPreset
from paceline.train.signals import TappedTarget

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
    rows=st.integers(1, 3), length=st.integers(6, 40), count=st.integers(1, 60),
    seed=st.integers(0, 99), from_anchor=st.booleans(),
)  # fmt: skip
def test_blocks_of_rows_of_several_texts_are_whole(
    rows: int, length: int, count: int, seed: int, from_anchor: bool
) -> None:
    config = replace(CONFIG, from_anchor=from_anchor)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 9, (rows, length))  # 0 ends texts
    positions = torch.arange(length).expand(rows, length)
    possible = whole_blocks(tokens, config.levels, separator=0)
    blocks = TrainingBlocks.draw(config, tokens, positions, possible, count)
    check_blocks(config, blocks, tokens)
    for row in range(rows):
        drawn = blocks.anchors[row][blocks.counted[row, :, 0]].tolist()
        assert len(drawn) == len(set(drawn)) == min(count, int(possible[row].sum()))
        for anchor in drawn:
            inside = tokens[row, anchor : anchor + config.levels + 1]
            assert anchor >= 1
            assert len(inside) == config.levels + 1
            assert (inside[:-1] != 0).all()  # the last may end the text
    assert (blocks.counted.all(-1) == blocks.counted[..., 0]).all()


def check_blocks(config: DSparkConfig, blocks: TrainingBlocks, tokens: Tensor) -> None:
    """Every label that counts follows its anchor in the row."""
    for row, block, level in blocks.counted.nonzero().tolist():
        place = int(blocks.target[row, block, 0]) - row * tokens.shape[1]
        assert blocks.fed[row, block].tolist() == [
            int(tokens[row, place]), *[0] * (config.block - 1)
        ]  # fmt: skip
        assert blocks.target[row, block, level] == row * tokens.shape[1] + place + level
        assert blocks.before[row, block, level] == tokens[row, place + level]
        assert blocks.labels[row, block, level] == tokens[row, place + level + 1]


def test_the_loss_by_hand() -> None:
    preset = replace(SMALL, ce=0.1, tv=0.9, certainty=1.0)
    torch.manual_seed(0)
    draft, target = (torch.randn(2, 3, 5).log_softmax(-1) for _ in range(2))
    wanted, confidence = torch.tensor([[0, 4, 1], [2, 5, 3]]), torch.randn(2, 3)
    counted = torch.tensor([[True, True, False], [True, True, True]])
    expected = 0.0
    for block in range(2):
        for place in range(2):  # text ends in one block, an undrafted token ends the other
            weight = torch.exp(torch.tensor(-place / 3))
            distance = (draft[block, place].exp() - target[block, place].exp()).abs().sum()
            label, said = 1 - distance / 2, confidence[block, place].sigmoid()
            known = bool(wanted[block, place] < 5)
            label = label if known else torch.tensor(0.0)
            loss = -(label * said.log() + (1 - label) * (1 - said).log())
            if known:
                entropy = -(target[block, place].exp() * draft[block, place]).sum()
                loss = loss + 0.1 * entropy + 0.9 * distance
            expected += float(weight * loss) / 2
    # With an identity as LM head, hidden states are logits.
    given = (draft, None, None, confidence, target, torch.eye(5), wanted, counted)
    assert float(weighted_loss(*given, preset)) == pytest.approx(expected)


@pytest.mark.parametrize("markov", [True, False])
def test_the_fused_loss_is_that_of_all_logits_and_so_is_its_gradient(markov: bool) -> None:
    torch.manual_seed(0)
    shape = (CHUNK // 2 + 3, 3)  # more than one chunk
    hidden = torch.randn(*shape, 16, requires_grad=True)
    features, w2 = torch.randn(*shape, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    states, head = torch.randn(*shape, 16), torch.randn(9, 16)
    labels, counted = torch.randint(0, 10, shape), torch.rand(shape) < 0.9
    counted[0] = True
    given = (features, w2) if markov else (None, None)
    fused = weighted_loss(hidden, *given, None, states, head, labels, counted, SMALL)
    rounded = weighted_loss(hidden, *given, None, states, head.bfloat16(), labels, counted, SMALL)
    torch.testing.assert_close(rounded, fused, rtol=0.05, atol=0)
    weights, known = label_weights(labels, counted, 9)
    logits = hidden @ head.T + (features @ w2.T if markov else 0)
    draft, target = logits.log_softmax(-1), (states @ head.T).softmax(-1)
    entropy = -(target * draft).sum(-1)
    distance = (draft.exp() - target).abs().sum(-1)
    plain = ((SMALL.ce * entropy + SMALL.tv * distance) * known * weights).sum()
    torch.testing.assert_close(fused, plain)
    inputs = (hidden, features, w2) if markov else (hidden,)
    found, expected = (torch.autograd.grad(2 * loss, inputs) for loss in (fused, plain))
    torch.testing.assert_close(found, expected)


def test_the_target_reads_as_a_verifier_would(target: Path) -> None:
    """Rows by themselves, longer than a chunk; the head makes the logits of hidden states."""
    reader = TappedTarget(load_decoder(target), open_model(target), [0, 1])
    tokens = torch.randint(1, 300, (2, 300))
    taps, states = reader.read(tokens)
    assert taps.shape == (600, 2 * load_config(target).hidden)
    alone, own = reader.read(tokens[1:, :156])
    assert torch.equal(alone, taps[300:456])
    assert torch.equal(own, states[300:456])
    whole = [tokens[0].tolist(), tokens[1, :156].tolist()]
    for text, state in zip(whole, (states[299], states[455]), strict=True):
        ((_, (token,)),) = write_texts(reader.decoder, [Task(text, SamplingRules(0.0), 1)], None)
        assert (reader.head.float() @ state).argmax().item() == token


def chains(temperatures: Sequence[float], count: int, seed: int = 1) -> list[Chain]:
    """Chains whose tokens are accepted with the probability of their logits over temperatures."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0.5, 2, (count, len(temperatures)))
    accepted = draw.random(logits.shape) < 1 / (1 + np.exp(-logits / temperatures))
    confidences = 1 / (1 + np.exp(-logits))
    return [
        Chain(tuple(row), int(right.cumprod().sum()))
        for row, right in zip(confidences.tolist(), accepted, strict=True)
    ]


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (2.0, 0.5), (0.5, 3.0)])
def test_the_temperatures_that_made_confidences_wrong_are_found(
    temperatures: tuple[float, ...],
) -> None:
    found = fit_temperatures(chains(temperatures, 6000), 2)
    assert found == pytest.approx(temperatures, rel=0.15)


def test_levels_with_few_chains_keep_their_logits() -> None:
    many = chains((3.0,), 500)
    few = chains((3.0, 3.0), 50, seed=2)
    assert fit_temperatures([*many, *few], 3)[1:] == (1.0, 1.0)
    assert fit_temperatures([*many, *few], 3)[0] > 1.5
    assert fit_temperatures(few, 2) == (1.0, 1.0)
    assert fit_temperatures([], 2) == (1.0, 1.0)
