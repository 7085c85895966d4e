"""What tokens of a text see of one another."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels import SINKS


def window_mask(length: int, window: int) -> Tensor:
    """Self-attention of a text: each token sees itself and the ``window - 1`` before it.

    Returns:
        bool ``[length, length]``, rows are queries.
    """
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen.triu(1 - window)


def lag_mask(length: int, lag: int, context: int = 0) -> Tensor:
    """Cross-attention of a text whose token at position p sees target positions up to ``p - lag``.

    While drafting, the anchor sees all before it (lag 1) and a node of level d all before the
    anchor (lag d + 1). Flash noisy training (LongSpec, algorithm 2) trains with each of these lags.

    Args:
        length: Tokens.
        lag: 1 or more: a token's own KV is never there yet.
        context: Positions seen at most, as by :func:`paceline.kernels.streaming`; 0 for all.

    Returns:
        bool ``[length, length]``, rows are queries; the first ``lag`` rows see nothing.
    """
    if lag < 1:
        raise ValueError(f"lag is {lag}, expected 1 or more: a token never sees its own target KV")
    seen = torch.ones(length, length, dtype=torch.bool).tril(-lag)
    if context:
        near = seen.triu(SINKS + 1 - lag - context)
        near[:, :SINKS] = seen[:, :SINKS]
        return near
    return seen
