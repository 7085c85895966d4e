"""Measurements: loss on text, repetition in generated text."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Documents = Sequence[Sequence[int]]
"""Token ids of each document."""


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; `batch` is int64 [rows, length + 1]."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def text_loss(model: nn.Module, documents: Documents, length: int = 1024) -> float:
    """Mean loss in nats per token over `documents`, read in windows of `length` tokens.

    Raises ValueError if no document has two tokens.
    """
    total, count = 0.0, 0
    model.eval()
    for window in _windows(documents, length, next(model.parameters()).device):
        with torch.autocast(window.device.type, torch.bfloat16):
            value = next_token_loss(model, window)
        total += value.item() * (window.shape[1] - 1)
        count += window.shape[1] - 1
    return total / count


def distinct_ngrams(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that are distinct: 1 for text that never repeats, near 0 for a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _windows(documents: Documents, length: int, device: torch.device) -> Iterator[Tensor]:
    """Windows of up to `length` + 1 tokens, int64 [1, tokens], that overlap by one token."""
    starts = [(ids, s) for ids in documents for s in range(0, len(ids) - 1, length)]
    if not starts:
        raise ValueError("no text to measure: every document is shorter than two tokens")
    for ids, start in starts:
        yield torch.tensor([ids[start : start + length + 1]], device=device)
