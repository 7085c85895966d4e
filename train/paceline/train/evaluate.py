"""Measurements: loss on given text, and whether greedy text repeats itself."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; `batch` is int64 [rows, length + 1]."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def text_loss(model: nn.Module, documents: Sequence[Sequence[int]], length: int = 1024) -> float:
    """Mean loss in nats per token over `documents` (token ids), in windows of `length` tokens.

    Raises ValueError where no document has two tokens.
    """
    device = next(model.parameters()).device
    model.eval()
    total, count = 0.0, 0
    for ids in documents:
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor([ids[start : start + length + 1]], device=device)
            with torch.autocast(device.type, torch.bfloat16):
                value = next_token_loss(model, window)
            total += value.item() * (window.shape[1] - 1)
            count += window.shape[1] - 1
    if count == 0:
        raise ValueError("no text to measure: every document is shorter than two tokens")
    return total / count


@torch.no_grad()
def continuation(
    model: PreTrainedModel, prompt: Sequence[int], tokens: int, temperature: float = 0.0
) -> list[int]:
    """Up to `tokens` token ids after `prompt`; greedy at temperature 0, else sampled."""
    ids = torch.tensor([list(prompt)], device=model.device)
    model.eval()
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0,
        **({"do_sample": False} | sampling),
    )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


def distinct_ngrams(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that are distinct: 1 for text that never repeats, near 0 for a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
