"""The masks that define how a LongSpec layer drafts, and by which lags it is trained."""

import torch
from torch import Tensor

from paceline.kernels import SINKS


def window_mask(length: int, window: int) -> Tensor:
    """Returns a self-attention mask: each token sees itself and the ``window - 1`` before it.

    Returns:
        bool ``[length, length]``, rows are queries.
    """
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen.triu(1 - window)


def lag_mask(length: int, lag: int, context: int = 0) -> Tensor:
    """Returns a cross-attention mask: the token at position p sees the target up to ``p - lag``.

    While drafting, the anchor sees all positions before it (lag 1), and a node of level d all
    positions before the anchor (lag d + 1). Flash noisy training (LongSpec, algorithm 2) trains
    with each of these lags.

    Args:
        lag: 1 or more, because a token's own KV is not committed yet.
        context: Maximum number of positions seen, selected as by
            :func:`paceline.kernels.streaming`; 0: all.

    Returns:
        bool ``[length, length]``, rows are queries; the first ``lag`` rows see nothing.
    """
    seen = torch.ones(length, length, dtype=torch.bool).tril(-lag)
    if context:
        near = seen.triu(SINKS + 1 - lag - context)
        near[:, :SINKS] = seen[:, :SINKS]
        return near
    return seen
