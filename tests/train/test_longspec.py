"""Parts of a LongSpec step: indices, lags, the fused loss, stages."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longspec_masks import lag_mask, window_mask
from torch.nn import functional as F

from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.kernels import SINKS, streaming
from paceline.train import longspec as training
from paceline.train.batches import PADDING
from paceline.train.longspec import CHUNK, LaggedLayer, divergence, offset_positions
from paceline.train.modules import LongSpecModel
from paceline.train.modules.layers import apply_rope
from paceline.train.presets import Plan, Stage
from paceline.train.recipes.longspec import LONGSPEC_PRESETS
from paceline.train.signals import Signals

_WINDOW = 8


def _model() -> LongSpecModel:
    torch.manual_seed(0)
    return LongSpecModel(
        LongSpecConfig(
            hidden=32, intermediate=48, q_heads=4, kv_heads=2, head_dim=16, vocab_size=50,
            max_position=512, norm_eps=1e-6, window=_WINDOW,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            target_layer=0, target_layers=1,
        )
    )  # fmt: skip


@given(rows=st.integers(1, 5), length=st.integers(5, 60), spare=st.integers(0, 500))
def test_offset_indices_are_those_of_algorithm_1(rows: int, length: int, spare: int) -> None:
    positions = offset_positions(rows, length, length + spare)
    assert positions.shape == (rows, length)
    for row in positions.tolist():
        assert row[:SINKS] == [0, 1, 2, 3]
        offset = row[SINKS] - SINKS
        assert 0 <= offset <= spare
        assert row[SINKS:] == [offset + i for i in range(SINKS, length)]


@settings(max_examples=30)
@given(
    length=st.integers(6, 40), lags=st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True)
)
def test_lags_are_those_of_the_masks(length: int, lags: list[int]) -> None:
    """Several lags in one pass, without masks, give what the dense layer gives with them."""
    model = _model()
    torch.manual_seed(length)
    keys, values = torch.randn(2, 2, 2, length, 16).unbind(0)
    embedded = torch.randn(2, length, 32)
    positions = torch.arange(length).expand(2, length)
    found = LaggedLayer(model)(embedded, positions, keys, values, lags, 0)
    for part, lag in zip(found, lags, strict=True):
        dense = model(
            embedded, positions, window_mask(length, _WINDOW), keys, values, lag_mask(length, lag)
        )
        torch.testing.assert_close(part[:, lag:], dense[:, lag:])


@pytest.mark.parametrize("offset", [True, False])
def test_the_end_of_a_text_reads_the_whole_of_it(
    offset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of two texts' ends, of all tokens at once and of each token alone."""
    monkeypatch.setattr(training, "TAIL", 16)
    torch.manual_seed(0)
    model, length = _model(), 40
    tokens, head = torch.randint(0, 50, (length + 28,)), torch.randn(50, 32)
    kv, states = torch.randn(len(tokens), 2, 2, 16), torch.randn(len(tokens), 32)
    signals = Signals(tokens, [0, length, len(tokens)], states, kv, torch.empty(len(tokens), 0))
    preset = replace(LONGSPEC_PRESETS["smollm2"], levels=3, offset=offset)
    plan = Plan((Stage("", 1.0, 2, 20, offset=True),), minutes=1, steps=1)
    rows = torch.full((2, length), PADDING)
    rows[0], rows[1, -28:] = torch.arange(length), length + torch.arange(28)
    calls: list[tuple[torch.Tensor, ...]] = []

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs)
        found: torch.Tensor = model(*inputs)
        return found

    loss = training.SignalLoss(model, torch.randn(50, 32), head, signals, preset, plan)
    value = loss(forward, rows, 0.0)  # type: ignore[arg-type]
    ((embedded, positions, near, keys, values, far),) = calls
    whole = model(embedded, positions, near, keys, values, far)
    for token in (0, 9, 15):
        part = slice(token, token + 1)
        end = embedded.shape[1] - 15 + token
        one = model(
            embedded[:, :end], positions[:, :end], near[:, part, :end], keys, values, far[:, part]
        )
        torch.testing.assert_close(one[:, 0], whole[:, token])
    assert near.sum(-1).eq(_WINDOW).all()
    lags = length - 15 + torch.arange(16) - far.sum(-1)
    lags[1] -= 12  # padding before the shorter text
    assert set(lags.flatten().tolist()) == {1, 2, 3}
    shifts = positions[:, -1] - torch.tensor([length - 1, 27])
    assert shifts.gt(0).all() if offset else shifts.eq(0).all()
    # The keys are those of the new positions, but for the first ones.
    unmoved = kv[:length, 0].transpose(0, 1)
    torch.testing.assert_close(keys[0, :, :SINKS], unmoved[:, :SINKS])
    turned = apply_rope(unmoved[:, SINKS:], model.rope_factors(shifts[:1, None]))
    torch.testing.assert_close(keys[0, :, SINKS:], turned[0])
    log_p = (states[rows[:, -16:-1]] @ head.T).log_softmax(-1)
    log_q = (whole[:, :-1] @ head.T).log_softmax(-1)  # the last has no next token
    torch.testing.assert_close(value, (log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_a_context_shows_what_a_drafter_reads_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token sees the positions before its anchor that `streaming` selects."""
    monkeypatch.setattr(training, "TAIL", 16)
    torch.manual_seed(0)
    model, length, context = _model(), 40, 9
    tokens, kv = torch.randint(0, 50, (length,)), torch.randn(length, 2, 2, 16)
    signals = Signals(tokens, [0, length], torch.randn(length, 32), kv, torch.empty(length, 0))
    preset = replace(LONGSPEC_PRESETS["smollm2"], noise=False, contexts=(0, context))
    plan = Plan((Stage("", 1.0, 2, 20),), minutes=1, steps=1)
    loss = training.SignalLoss(
        model, torch.randn(50, 32), torch.randn(50, 32), signals, preset, plan
    )
    seen = list[torch.Tensor]()

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs[-1][0])
        return torch.zeros(1, 16, 32, requires_grad=True)

    for _ in range(9):
        loss(forward, torch.arange(length)[None], 0.0)  # type: ignore[arg-type]
    counts = Counter[int]()
    for row, mask in enumerate(torch.stack(seen, 1), length - 16):
        for each in mask:
            found = each.nonzero().flatten().tolist()
            limit = 0 if len(found) == row else context
            assert found == [at for part in streaming(row, limit) for at in part]
            counts[limit] += 1
    assert counts[0] > counts[context] > 0  # two of three
    assert replace(preset, contexts=(64, 128)).context_weights == pytest.approx(
        {64: 1 / 3, 128: 1 / 6}
    )
    with pytest.raises(ValueError, match="trains no contexts"):
        replace(LONGSPEC_PRESETS["cpu"], contexts=(64,))
    with pytest.raises(ValueError, match="expected 0 or 8"):
        replace(preset, contexts=(4,))


@pytest.mark.parametrize("rows", [7, CHUNK, 2 * CHUNK + 3])
def test_the_fused_loss_is_the_divergence_and_so_is_its_gradient(rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, rows, 16, requires_grad=True)
    target, head = torch.randn(rows, 16), torch.randn(50, 16)
    weights = torch.rand(3, rows)
    weights /= weights.sum()
    fused = divergence(hidden, target, head, weights)
    (found,) = torch.autograd.grad(2 * fused, hidden)
    log_p, log_q = F.linear(target, head).log_softmax(-1), F.linear(hidden, head).log_softmax(-1)
    plain = ((log_p.exp() * (log_p - log_q)).sum(-1) * weights).sum()
    (expected,) = torch.autograd.grad(2 * plain, hidden)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(found, expected)
