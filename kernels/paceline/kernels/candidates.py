"""The best candidates for the next token of several rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.kernels._native import library


def best_candidates(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row, as the softmax of the row sees them.

    Args:
        scores: Float ``[R, V]``.
        width: Candidates of a row, at most V.

    Returns:
        Ids, int64 ``[R, width]``, best first, and the logs of their softmax, ``[R, width]``; on the
        device of ``scores``. Ids with log -inf are arbitrary.
    """
    native = library() if scores.device.type == "cpu" else None
    if native is None or scores.dtype is not torch.float32 or scores.stride(1) != 1:
        # Logs only after the top-k: rounding could make two scores equal.
        ids = scores.topk(width).indices
        return ids, scores.log_softmax(-1).gather(1, ids)
    rows, count = scores.shape
    ids = torch.empty(rows, width, dtype=torch.int64)
    logs = torch.empty(rows, width)
    native.paceline_candidates(
        ctypes.c_void_p(scores.data_ptr()),
        *map(ctypes.c_int64, (scores.stride(0), rows, count, width)),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_void_p(logs.data_ptr()),
    )
    return ids, logs
