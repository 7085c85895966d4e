"""The dense LongSpec layer, as training uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    lag_mask,
    window_mask,
)
from paceline.kernels import streaming

CONFIG = LongSpecConfig(
    hidden=24, intermediate=40, q_heads=6, kv_heads=2, head_dim=8, vocab_size=50, max_position=4096,
    norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, target_layer=2,
    target_layers=3, window=5,
)  # fmt: skip


@pytest.fixture
def model() -> LongSpecModel:
    torch.manual_seed(0)
    made = LongSpecModel(CONFIG)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return made


def inputs(batch: int, length: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, CONFIG.hidden, generator=draws)
    shape = (2, batch, CONFIG.kv_heads, keys, CONFIG.head_dim)
    k, v = torch.randn(shape, generator=draws)
    return x, k, v


def turned(x: Tensor, position: float) -> Tensor:
    """Rotary embedding of one head, pair after pair."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = torch.tensor(position * 1e4 ** (-i / half))
        out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
        out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
    return out


def test_one_token_by_hand(model: LongSpecModel) -> None:
    """Token 7 of a text whose target KV is known up to position 3, head by head."""
    x, keys, values = inputs(1, 8, 4)
    positions = torch.arange(8)
    cross = torch.ones(8, 4, dtype=torch.bool)
    found = model(x, positions, window_mask(8, 5), keys, values, cross)[0, 7]

    w = dict(model.named_parameters())

    def normed(row: Tensor, name: str) -> Tensor:
        return row / (row.square().mean() + 1e-6).sqrt() * w[f"{name}.weight"]

    def project(row: Tensor, name: str) -> Tensor:
        return w[f"layers.0.{name}.weight"] @ row

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = []
        for head in range(6):
            at = head // 3
            weights = (k[at] @ turned(q.view(6, 8)[head], 7.0) / 8**0.5).softmax(0)
            heads.append(weights @ v[at])
        return torch.cat(heads)

    rows = [normed(x[0, t], "layers.0.input_layernorm") for t in range(3, 8)]
    k = torch.stack([project(row, "self_attn.k_proj").view(2, 8) for row in rows], dim=1)
    k = torch.stack([torch.stack([turned(k[h, t], 3.0 + t) for t in range(5)]) for h in range(2)])
    v = torch.stack([project(row, "self_attn.v_proj").view(2, 8) for row in rows], dim=1)
    out = x[0, 7]
    seen = attention(project(rows[-1], "self_attn.q_proj"), k, v)
    out = out + project(seen, "self_attn.o_proj")
    q = project(normed(out, "layers.0.cross_layernorm"), "cross_attn.q_proj")
    out = out + project(attention(q, keys[0], values[0]), "cross_attn.o_proj")
    h = normed(out, "layers.0.post_attention_layernorm")
    wide = F.silu(project(h, "mlp.gate_proj")) * project(h, "mlp.up_proj")
    out = normed(out + project(wide, "mlp.down_proj"), "norm")
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", [0, 5, 7])
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_lagged_text_is_what_drafting_sees(model: LongSpecModel, lag: int, context: int) -> None:
    """Row p of one training pass equals drafting it with all but the last lag positions known."""
    x, keys, values = inputs(1, 12, 12)
    at = torch.arange(12)
    window = window_mask(12, CONFIG.window)
    trained = model(x, at, window, keys, values, lag_mask(12, lag, context))
    for p in range(12):
        known = max(0, p - lag + 1)
        read = torch.zeros(12, known, dtype=torch.bool)
        for part in streaming(known, context):
            read[:, part.start : part.stop] = True
        drafted = model(x, at, window, keys[:, :, :known], values[:, :, :known], read)
        torch.testing.assert_close(trained[0, p], drafted[0, p], rtol=1e-4, atol=1e-5)


def test_rows_of_a_batch_have_their_own_positions_and_masks(model: LongSpecModel) -> None:
    x, keys, values = inputs(3, 6, 6)
    positions = torch.stack([torch.arange(6), torch.arange(6) + 900, torch.arange(6) * 2])
    own = torch.stack([window_mask(6, w) for w in (1, 3, 6)])
    cross = torch.stack([lag_mask(6, lag) for lag in (1, 2, 4)])
    together = model(x, positions, own, keys, values, cross)
    for i in range(3):
        part = slice(i, i + 1)
        alone = model(x[part], positions[i], own[i], keys[part], values[part], cross[i])
        torch.testing.assert_close(together[part], alone, rtol=1e-4, atol=1e-5)
    moved = model(x[:1], positions[1], own[0], keys[:1], values[:1], cross[0])
    assert not torch.allclose(moved, together[:1], atol=1e-3)  # the target's keys stay behind


def test_everything_is_trained(model: LongSpecModel) -> None:
    x, keys, values = inputs(2, 9, 9)
    out = model(x, torch.arange(9), window_mask(9, 5), keys, values, lag_mask(9, 3))
    assert out.isfinite().all()
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert "norm.weight" not in LongSpecModel(replace(CONFIG, final_norm=False)).state_dict()


def test_a_lag_below_one_would_show_a_token_its_own_future() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        lag_mask(4, 0)
    assert window_mask(4, 2).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]
