"""Measurements: loss on text, agreement of two models, repetition in generated text."""

from collections.abc import Iterator, Sequence
from typing import Any

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


@torch.no_grad()
def agreement(student: nn.Module, teacher: nn.Module, documents: Documents) -> tuple[float, float]:
    """How closely two models agree on the tokens of `documents`, as means over all positions.

    Returns (share of positions where both rank the same token first, overlap of the two
    distributions: 1 minus their total variation). The overlap is the chance that rejection
    sampling at temperature 1 accepts a token the student drafted.

    Raises ValueError if no document has two tokens.
    """
    same, overlap, count = 0.0, 0.0, 0
    for window in _windows(documents, 1024, next(student.parameters()).device):
        ours, theirs = (
            model(input_ids=window[:, :-1], use_cache=False).logits.float().softmax(-1)
            for model in (student.eval(), teacher.eval())
        )
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        overlap += torch.minimum(ours, theirs).sum().item()
        count += window.shape[1] - 1
    return same / count, overlap / count


@torch.no_grad()
def top1_hits(model: Any, ids: Sequence[int], last: int) -> list[bool]:
    """For each of the `last` tokens of `ids`: does `model` rank it first, given those before?"""
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    predicted = model.eval()(input_ids=tokens[:, :-1], use_cache=False).logits.argmax(-1)
    hits: list[bool] = (predicted == tokens[:, 1:])[0].tolist()
    return hits[len(hits) - last :]


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
