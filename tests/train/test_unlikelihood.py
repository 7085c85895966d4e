"""Marks what repeats itself, and makes it less likely."""

from dataclasses import replace

import torch

from paceline.train.evaluate import next_token_loss
from paceline.train.model import build_model
from paceline.train.preset import Preset
from paceline.train.unlikelihood import Unlikelihood, repeats


def test_tokens_that_complete_an_earlier_4_gram_are_marked() -> None:
    row = [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 5, 1, 2, 3, 4, 0, 2, 3, 4, 0]
    marked = repeats(torch.tensor([row, list(range(1, 21))]), start=6, separator=0)
    assert marked[0].nonzero()[:, 0].tolist() == [8, 9, 14]  # the second (2, 3, 4, 0) is too late
    assert not marked[1].any()


def test_repetition_is_unlearnt(preset: Preset) -> None:
    """A model that was trained on a loop alone unlearns it."""
    model = build_model(replace(preset, context=512), eos=0)
    text = list(range(1, 9)) * 50
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        next_token_loss(model, torch.tensor([text[:129]] * 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = Unlikelihood([text], separator=0, share=1.0)
    torch.manual_seed(0)
    values = []
    for _ in range(6):
        value = loss(model, None)
        assert isinstance(value, torch.Tensor)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    assert values[0] > 1
    assert values[-1] < 0.5 * values[0]
