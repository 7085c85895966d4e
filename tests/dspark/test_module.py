"""The dense DSpark backbone and its heads against the paper's formulas, written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafter.methods.dspark import MARKOV_HEADS, ConfidenceHead, DSparkModel, MarkovHead

from .shapes import CONFIG, make


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head, pair after pair."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = torch.tensor(position * 1e4 ** (-i / half))
        out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
        out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
    return out


def by_hand(model: DSparkModel, embedded: Tensor, anchor: int, taps: Tensor) -> Tensor:
    """Equations 2 and 3 for one block that sees ``taps``, those of positions 0 to anchor - 1."""
    weights = model.state_dict()
    context = [normed(weights["fc.weight"] @ row, weights["hidden_norm.weight"]) for row in taps]
    x = list(embedded)
    for number in range(model.config.layers):
        w = {n: weights[f"layers.{number}.{n}.weight"] for n in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )}  # fmt: skip
        inputs = [normed(row, w["input_layernorm"]) for row in x]
        places = [*enumerate(context), *enumerate(inputs, start=anchor)]
        keys = [
            [turned(normed(head, w["self_attn.k_norm"]), place)
             for head in (w["self_attn.k_proj"] @ row).split(8)]
            for place, row in places
        ]  # fmt: skip
        values = [(w["self_attn.v_proj"] @ row).split(8) for _, row in places]
        for place, row in enumerate(inputs):
            heads = []
            for head, part in enumerate((w["self_attn.q_proj"] @ row).split(8)):
                q = turned(normed(part, w["self_attn.q_norm"]), anchor + place)
                scores = torch.stack([q @ key[head // 3] for key in keys]) / 8**0.5
                seen = zip(scores.softmax(0), values, strict=True)
                heads.append(sum(share * value[head // 3] for share, value in seen))
            x[place] = x[place] + w["self_attn.o_proj"] @ torch.cat(heads)
            inner = normed(x[place], w["post_attention_layernorm"])
            gate = torch.nn.functional.silu(w["mlp.gate_proj"] @ inner)
            x[place] = x[place] + w["mlp.down_proj"] @ (gate * (w["mlp.up_proj"] @ inner))
    return torch.stack([normed(row, weights["norm.weight"]) for row in x])


@pytest.mark.parametrize("anchor", [0, 1, 9])
def test_a_block_by_hand(anchor: int) -> None:
    model = make(CONFIG)
    embedded, taps = torch.randn(4, 24), torch.randn(anchor, 48)
    seen = torch.arange(anchor)[None]
    positions = torch.arange(anchor)
    with torch.no_grad():
        if anchor == 0:  # nothing before it: one row that is not seen
            taps, positions, seen = torch.randn(1, 48), torch.tensor([5]), torch.tensor([[-1]])
        found = model(embedded[None], torch.tensor([anchor]), taps, positions, seen)
        expected = by_hand(model, embedded, anchor, taps[:anchor])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def test_the_anchors_place_predicts_only_where_the_layout_says_so() -> None:
    model = make(CONFIG)
    later = make(replace(CONFIG, from_anchor=False))
    blocks = torch.randn(2, 4, 24), torch.tensor([3, 5]), torch.randn(3, 48), torch.arange(3)
    seen = torch.tensor([[0, 1, 2], [2, -1, -1]])
    with torch.no_grad():
        assert model(*blocks, seen).shape == (2, 4, 24)
        torch.testing.assert_close(later(*blocks, seen), model(*blocks, seen)[:, 1:])


@settings(max_examples=25)
@given(data=st.data())
def test_packed_blocks_know_nothing_of_each_other(data: st.DataObject) -> None:
    """Several texts in one pack, windows in any order and padded: each block as if alone."""
    model = make(CONFIG)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    texts = [torch.randn(length, 48) for length in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=4))
    anchors = [data.draw(st.integers(0, lengths[text])) for text in blocks]
    embedded = torch.randn(len(blocks), 4, 24)
    seen = torch.full((len(blocks), max(lengths) + 1), -1)
    for row, text, anchor in zip(seen, blocks, anchors, strict=True):
        slots = torch.randperm(len(row))[:anchor]
        row[slots] = starts[text] + torch.arange(anchor)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        found = model(embedded, torch.tensor(anchors), torch.cat(texts), positions, seen)
        for number, (text, anchor) in enumerate(zip(blocks, anchors, strict=True)):
            one = torch.arange(anchor)[None] if anchor else torch.tensor([[-1]])
            alone = model(
                embedded[number : number + 1], torch.tensor([anchor]), texts[text],
                torch.arange(lengths[text]), one,
            )  # fmt: skip
            torch.testing.assert_close(found[number], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_the_sequential_head_by_hand(kind: str) -> None:
    config = replace(CONFIG, markov_head=kind)
    head = make(config).markov_head
    assert isinstance(head, MarkovHead)
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    before, hidden = torch.tensor([[3, 9, 3]]), torch.randn(1, 3, 24)
    with torch.no_grad():
        bias, rows = head(before, hidden)
        state = torch.zeros(6)
        for place, token in enumerate(before[0]):
            features = w1[token]
            assert torch.equal(rows[0, place], features)
            if kind == "gated":
                wide = torch.cat([hidden[0, place], features])
                features = features * torch.sigmoid(head.gate_proj(wide))
            elif kind == "rnn":
                z = torch.cat([state, features, hidden[0, place]])
                gate, candidate, output = head.joint_proj(z).split(6)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                features = output.tanh()
            torch.testing.assert_close(bias[0, place], w2 @ features)


def test_a_new_head_changes_nothing() -> None:
    """So training begins at DFlash."""
    head = MarkovHead(CONFIG)
    bias, _ = head(torch.tensor([[3, 9]]), torch.randn(1, 2, 24))
    assert not bias.any()


@pytest.mark.parametrize("markov", [True, False])
def test_the_confidence_head_by_hand(markov: bool) -> None:
    head = ConfidenceHead(replace(CONFIG, confidence_markov=markov))
    hidden, before = torch.randn(2, 3, 24), torch.randn(2, 3, 6)
    inputs = torch.cat([hidden, before], -1) if markov else hidden
    expected = inputs @ head.proj.weight[0] + head.proj.bias
    torch.testing.assert_close(head(hidden, before), expected)
