"""The drafters that are trained, in dense PyTorch, against the papers' formulas written out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longspec_masks import lag_mask, window_mask
from torch import Tensor
from torch.nn import functional as F

from paceline.drafter.methods.dspark import MARKOV_HEADS, ConfidenceHead, MarkovHead
from paceline.kernels import streaming
from paceline.train.modules import DSparkModel, Eagle3Model, LongSpecModel

from .shapes import DSPARK, EAGLE3, LONGSPEC, randomised


@pytest.fixture
def model() -> LongSpecModel:
    return randomised(LongSpecModel(LONGSPEC))


def inputs(batch: int, length: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, LONGSPEC.hidden, generator=draws)
    shape = (2, batch, LONGSPEC.kv_heads, keys, LONGSPEC.head_dim)
    k, v = torch.randn(shape, generator=draws)
    return x, k, v


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def turned(x: Tensor, position: float) -> Tensor:
    """Rotary embedding of one head, pair after pair."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = torch.tensor(position * 1e4 ** (-i / half))
        out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
        out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
    return out


def attended(q: Sequence[Tensor], keys: Sequence[Any], values: Sequence[Any]) -> Tensor:
    """What six heads of a position read of positions with two heads each, one head at a time."""
    heads = []
    for number, head in enumerate(q):
        scores = torch.stack([head @ key[number // 3] for key in keys]) / 8**0.5
        shares = zip(scores.softmax(0), values, strict=True)
        heads.append(sum(share * value[number // 3] for share, value in shares))
    return torch.cat(heads)


def convolved(
    model: DSparkModel, name: str, rows: list[Tensor], source: list[Tensor], which: int
) -> list[Tensor]:
    """The convolution of DFlash 2: a weight of a channel is a fixed one and one of its group."""
    if model.config.conv is None:
        return rows
    weights, (size, group) = model.state_dict(), model.config.conv
    base, projection = weights[f"{name}.base_kernel"], weights[f"{name}.kernel_projection.weight"]
    found = []
    for place in range(len(rows)):
        own = (projection @ source[place]).view(2, size, -1)[which]
        row = torch.zeros(24)
        for back in range(min(size, place + 1)):
            for channel in range(24):
                weight = base[which, back, channel] + own[back, channel // group]
                row[channel] += weight * rows[place - back][channel]
        found.append(row)
    return found


def by_hand(model: DSparkModel, embedded: Tensor, anchor: int, taps: Tensor) -> Tensor:
    """Equations 2 and 3 for one block that sees ``taps``, those of positions 0 to anchor - 1."""
    weights = model.state_dict()
    projected = [weights["fc.weight"] @ row for row in taps]
    context = [normed(row, weights["hidden_norm.weight"]) for row in projected]
    x = list(embedded)
    if model.config.state_input and projected:
        x = [row + projected[-1] for row in x]
    for number in range(model.config.layers):
        w = {n: weights[f"layers.{number}.{n}.weight"] for n in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )}  # fmt: skip
        first = [normed(row, w["input_layernorm"]) for row in x]
        inputs = convolved(model, f"layers.{number}.attention_conv", first, first, 0)
        window, causal = model.config.attention[number]
        places = [*enumerate(context), *enumerate(inputs, start=anchor)]
        keys = [
            [turned(normed(head, w["self_attn.k_norm"]), place)
             for head in (w["self_attn.k_proj"] @ row).split(8)]
            for place, row in places
        ]  # fmt: skip
        values = [(w["self_attn.v_proj"] @ row).split(8) for _, row in places]
        outputs = []
        for place, row in enumerate(inputs):
            own = anchor + place
            oldest = (own if causal else anchor) - (window or 99)
            newest = own if causal else 99
            seen = [n for n, (at, _) in enumerate(places) if oldest <= at <= newest]
            parts = (w["self_attn.q_proj"] @ row).split(8)
            q = [turned(normed(part, w["self_attn.q_norm"]), own) for part in parts]
            read = attended(q, [keys[n] for n in seen], [values[n] for n in seen])
            outputs.append(w["self_attn.o_proj"] @ read)
        after = convolved(model, f"layers.{number}.attention_conv", outputs, first, 1)
        x = [row + more for row, more in zip(x, after, strict=True)]
        first = [normed(row, w["post_attention_layernorm"]) for row in x]
        gated = []
        for inner in convolved(model, f"layers.{number}.mlp_conv", first, first, 0):
            gate = torch.nn.functional.silu(w["mlp.gate_proj"] @ inner)
            gated.append(w["mlp.down_proj"] @ (gate * (w["mlp.up_proj"] @ inner)))
        after = convolved(model, f"layers.{number}.mlp_conv", gated, first, 1)
        x = [row + more for row, more in zip(x, after, strict=True)]
    return torch.stack([normed(row, weights["norm.weight"]) for row in x])


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "state input": {"state_input": True},
    "windows": {"window": 3},
    "a causal layer with a window": {"windows": (0, 3), "causal": (False, True)},
    "causal": {"causal": (True, True)},
    "DFlash 2": {"conv": (2, 8), "window": 3},
}


def trained_models() -> Iterator[Any]:
    """A model of each kind of drafter, with all its parts."""
    heads = {"markov_head": "product", "draft_vocab_size": 9}
    for change in (*PARTS.values(), heads, {"confidence_markov": False}, {"confidence": False}):
        if change == {"confidence": False}:
            change = {**change, "confidence_markov": False, "markov_rank": 0}
        yield DSparkModel(replace(DSPARK, **change))
    for norms in EAGLE3_NORMS.values():
        yield Eagle3Model(replace(EAGLE3, **norms))
    yield LongSpecModel(LONGSPEC)


def test_a_folder_has_the_tensors_of_the_model_that_was_trained() -> None:
    for model in trained_models():
        shapes = {name: tuple(t.shape) for name, t in model.named_parameters()}
        assert model.config.tensors() == shapes


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("anchor", [0, 1, 9])
def test_a_block_by_hand(anchor: int, parts: str) -> None:
    model = randomised(DSparkModel(replace(DSPARK, **PARTS[parts])))
    embedded, taps = torch.randn(4, 24), torch.randn(anchor, 48)
    with torch.no_grad():
        found = model(
            embedded[None, None], torch.tensor([[anchor]]), taps[None], torch.arange(anchor)[None]
        )
        expected = by_hand(model, embedded, anchor, taps)
    torch.testing.assert_close(found[0, 0], expected, rtol=1e-4, atol=1e-4)


def test_the_anchor_predicts_only_with_from_anchor() -> None:
    model = randomised(DSparkModel(DSPARK))
    later = randomised(DSparkModel(replace(DSPARK, from_anchor=False)))
    inputs = torch.randn(1, 2, 4, 24), torch.tensor([[3, 5]]), torch.randn(1, 3, 48)
    positions = torch.arange(3)[None]
    with torch.no_grad():
        assert model(*inputs, positions).shape == (1, 2, 4, 24)
        torch.testing.assert_close(later(*inputs, positions), model(*inputs, positions)[:, :, 1:])


@settings(max_examples=25)
@given(data=st.data())
def test_packed_blocks_are_independent(data: st.DataObject) -> None:
    """Blocks of several texts equal each block alone, with its window in any order."""
    window = data.draw(st.sampled_from([0, 1, 5]))
    model = randomised(
        DSparkModel(replace(DSPARK, window=window, state_input=data.draw(st.booleans())))
    )
    texts, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    lengths = [data.draw(st.integers(1, 12)) for _ in range(texts)]
    positions = torch.full((texts, max(lengths) + 1), -1)
    for row, length in zip(positions, lengths, strict=True):
        row[torch.randperm(len(row))[:length]] = torch.arange(length)
    anchors = torch.stack([torch.randint(0, length + 1, (blocks,)) for length in lengths])
    embedded, taps = torch.randn(texts, blocks, 4, 24), torch.randn(*positions.shape, 48)
    with torch.no_grad():
        found = model(embedded, anchors, taps, positions)
        for text, block in itertools.product(range(texts), range(blocks)):
            anchor = int(anchors[text, block])
            seen = (positions[text] >= 0) & (positions[text] < anchor)
            if window:
                seen &= positions[text] >= anchor - window
            alone = model(
                embedded[text, block][None, None], torch.tensor([[anchor]]),
                taps[text, seen][None], positions[text, seen][None],
            )  # fmt: skip
            torch.testing.assert_close(found[text, block], alone[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_the_sequential_head_by_hand(kind: str) -> None:
    config = replace(DSPARK, markov_head=kind)
    head = randomised(DSparkModel(config)).markov_head
    assert isinstance(head, MarkovHead)
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    before, hidden = torch.tensor([[3, 9, 3]]), torch.randn(1, 3, 24)
    with torch.no_grad():
        found, rows = head(before, hidden)
        bias = head.markov_w2(found)
        for place, token in enumerate(before[0]):
            features = w1[token]
            assert torch.equal(rows[0, place], features)
            if kind == "product":
                features = features * head.gate_proj(hidden[0, place])
            torch.testing.assert_close(bias[0, place], w2 @ features)


def test_a_new_head_has_no_bias() -> None:
    """Training starts from DFlash."""
    head = MarkovHead(DSPARK)
    features, _ = head(torch.tensor([[3, 9]]), torch.randn(1, 2, 24))
    assert not head.markov_w2(features).any()


@pytest.mark.parametrize("markov", [True, False])
def test_the_confidence_head_by_hand(markov: bool) -> None:
    head = ConfidenceHead(replace(DSPARK, confidence_markov=markov))
    hidden, before = torch.randn(2, 3, 24), torch.randn(2, 3, 6)
    inputs = torch.cat([hidden, before], -1) if markov else hidden
    expected = inputs @ head.proj.weight[0] + head.proj.bias
    torch.testing.assert_close(head(hidden, before), expected)


def test_one_token_by_hand(model: LongSpecModel) -> None:
    """Token 7 of a text whose target KV is known up to position 3, head by head."""
    x, keys, values = inputs(1, 8, 4)
    positions = torch.arange(8)
    cross = torch.ones(8, 4, dtype=torch.bool)
    found = model(x, positions, window_mask(8, 5), keys, values, cross)[0, 7]

    w = dict(model.named_parameters())

    def norm(row: Tensor, name: str) -> Tensor:
        return normed(row, w[f"{name}.weight"])

    def project(row: Tensor, name: str) -> Tensor:
        return w[f"layers.0.{name}.weight"] @ row

    def turned_heads(row: Tensor, place: int) -> list[Tensor]:
        return [turned(head, place) for head in row.split(8)]

    rows = [norm(x[0, place], "layers.0.input_layernorm") for place in range(3, 8)]
    k = [turned_heads(project(row, "self_attn.k_proj"), at) for at, row in enumerate(rows, 3)]
    v = [project(row, "self_attn.v_proj").split(8) for row in rows]
    q = turned_heads(project(rows[-1], "self_attn.q_proj"), 7)
    out = x[0, 7] + project(attended(q, k, v), "self_attn.o_proj")
    q = turned_heads(project(norm(out, "layers.0.cross_layernorm"), "cross_attn.q_proj"), 7)
    known = attended(q, keys[0].unbind(1), values[0].unbind(1))
    out = out + project(known, "cross_attn.o_proj")
    h = norm(out, "layers.0.post_attention_layernorm")
    wide = F.silu(project(h, "mlp.gate_proj")) * project(h, "mlp.up_proj")
    out = norm(out + project(wide, "mlp.down_proj"), "norm")
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", [0, 5, 7])
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_lag_mask_equals_drafting(model: LongSpecModel, lag: int, context: int) -> None:
    """Row p of one training pass equals drafting without the last ``lag`` target positions."""
    x, keys, values = inputs(1, 12, 12)
    at = torch.arange(12)
    window = window_mask(12, LONGSPEC.window)
    trained = model(x, at, window, keys, values, lag_mask(12, lag, context))
    for p in range(12):
        known = max(0, p - lag + 1)
        read = torch.zeros(12, known, dtype=torch.bool)
        for part in streaming(known, context):
            read[:, part.start : part.stop] = True
        drafted = model(x, at, window, keys[:, :, :known], values[:, :, :known], read)
        torch.testing.assert_close(trained[0, p], drafted[0, p], rtol=1e-4, atol=1e-5)


EAGLE3_NORMS = {
    "3": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "others": {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True},
}


@pytest.mark.parametrize("norms", EAGLE3_NORMS)
def test_an_eagle3_layer_by_hand(norms: str) -> None:
    """EAGLE-3, section 3.1: three tokens with states of the target, two with its own outputs."""
    model = randomised(Eagle3Model(replace(EAGLE3, **EAGLE3_NORMS[norms])))
    config, weights = model.config, model.state_dict()
    layer = {n.removeprefix("layers.0.")[:-7]: w for n, w in weights.items()}
    embedded, taps = torch.randn(5, 24), torch.randn(3, 72)
    states = []
    for row in taps:
        parts = row.split(24)
        if config.fc_norm:
            parts = tuple(normed(p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts))
        whole = torch.cat(parts)
        if config.norm_before_fc:
            whole = normed(whole, weights["input_norm.weight"])
        states.append(weights["fc.weight"] @ whole)
    keys, values, finals = [], [], []
    for place in range(5):
        hidden = normed(states[place], layer["hidden_norm"])
        inputs = torch.cat([normed(embedded[place], layer["input_layernorm"]), hidden])
        q, k, v = ((layer[f"self_attn.{n}_proj"] @ inputs).split(8) for n in "qkv")
        if config.qk_norm:
            q = [normed(head, layer["self_attn.q_norm"]) for head in q]
            k = [normed(head, layer["self_attn.k_norm"]) for head in k]
        keys.append([turned(head, place + 1) for head in k])
        values.append(v)
        read = attended([turned(head, place + 1) for head in q], keys, values)
        x = hidden if config.norm_before_residual else states[place]
        x = x + layer["self_attn.o_proj"] @ read
        inner = normed(x, layer["post_attention_layernorm"])
        gated = F.silu(layer["mlp.gate_proj"] @ inner) * (layer["mlp.up_proj"] @ inner)
        x = x + layer["mlp.down_proj"] @ gated
        finals.append(normed(x, weights["norm.weight"]))
        if place >= 2:
            states.append(finals[-1] if config.norm_output else x)
    with torch.no_grad():
        causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
        fused = model.fuse(taps[None])
        found, again, past = model(embedded[None, :3], fused, torch.tensor([[1, 2, 3]]), causal)
        outputs = [found[0]]
        for place in (3, 4):
            seen = torch.ones(1, 1, place + 1, dtype=torch.bool)
            inputs = embedded[None, place : place + 1], again[:, -1:], torch.tensor([[place + 1]])
            found, again, new = model(*inputs, seen, past)
            past = tuple(torch.cat(pair, dim=2) for pair in zip(past, new, strict=True))
            outputs.append(found[0])
    torch.testing.assert_close(torch.cat(outputs), torch.stack(finals), rtol=1e-4, atol=1e-4)
