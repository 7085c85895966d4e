"""What tokens of a text see of one another."""

from __future__ import annotations

import torch
from torch import Tensor


def window_mask(length: int, window: int) -> Tensor:
    """Self-attention of a text: each token sees itself and the ``window - 1`` before it.

    Returns:
        bool ``[length, length]``, rows are queries.
    """
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen.triu(1 - window)


def lag_mask(length: int, lag: int) -> Tensor:
    """Cross-attention of a text whose token at position p sees target positions up to ``p - lag``.

    While drafting, the anchor sees all before it (lag 1) and a node of level d all before the
    anchor (lag d + 1). Flash noisy training (LongSpec, algorithm 2) trains with each of these lags.

    Args:
        length: Tokens.
        lag: 1 or more: a token's own KV is never there yet.

    Returns:
        bool ``[length, length]``, rows are queries; the first ``lag`` rows see nothing.
    """
    if lag < 1:
        raise ValueError(f"lag is {lag}, expected 1 or more: a token never sees its own target KV")
    return torch.ones(length, length, dtype=torch.bool).tril(-lag)
