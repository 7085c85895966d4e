"""Launches of the kernels that choose candidates and grow trees."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.cuda.triton.backend import find_borders
from paceline.cuda.triton.jit.candidates import best_of_chunks, grow_level, merge_chunks
from paceline.cuda.triton.jit.sampling import ID_BITS

LARGE_VOCAB = 1 << 16  # logits of a row from which on chunks are larger


def best_of_rows(
    logits: Tensor,
    width: int,
    record: Tensor | None = None,
    ids: Tensor | None = None,
    *,
    filtered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the ``width`` largest scores of each row, float ``[R, V]``, rows dense, as the softmax
    of the row sees them, by two kernels.

    ``record`` has the rows' parameters of filters and noise on the device, as of
    :func:`~paceline.cuda.triton.backend.sampling_record`; None: scores are the logits. ``ids`` has
    the token of each logit, rising, int64 ``[V]`` on the device; None: its index. ``filtered``: a
    row has a filter.

    Returns tokens, int64 ``[R, width]``, best first and of equal ones the lowest first, and the
    logs of their softmax, float32 ``[R, width]``. Raises ``ValueError`` for more tokens than the
    kernels' keys have room for.
    """
    rows, vocab = logits.shape
    if vocab > 1 << ID_BITS.value:
        raise ValueError(f"{vocab} tokens, expected at most {1 << ID_BITS.value}")
    chunk = 1024 if vocab < LARGE_VOCAB else 4096
    chunks = triton.cdiv(vocab, chunk)
    device, stride = logits.device, logits.stride(0)
    tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
    logs = torch.empty(rows, width, dtype=torch.float32, device=device)
    keys = torch.empty(rows, chunks, width, dtype=torch.int64, device=device)
    sums = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    given = tokens if record is None else record  # without noise no record is read
    borders = given
    if record is not None and filtered:
        borders = find_borders(logits, record)
    reduced = tokens if ids is None else ids
    best_of_chunks[(rows, chunks)](
        logits, reduced, given, given.view(torch.float64), borders, keys, sums, vocab, stride,
        width, NOISE=record is not None, FILTERED=filtered, REDUCED=ids is not None, CHUNK=chunk,
        num_warps=chunk // 256,
    )  # fmt: skip
    size = triton.next_power_of_2(chunks * width)
    merge_chunks[(rows,)](
        keys, sums, reduced, tokens, logs, chunks, WIDTH=width, REDUCED=ids is not None,
        CHUNKS=triton.next_power_of_2(chunks), SIZE=size, num_warps=min(8, max(1, size // 128)),
    )  # fmt: skip
    return tokens, logs


def grow_trees(
    candidates: tuple[Tensor, Tensor],
    above: Tensor,
    last: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    paths: Tensor | None,
    first: int,
    size: int,
    *,
    min_score: float,
    chain: bool,
    confidences: Tensor | None = None,
) -> Tensor:
    """Add a level to the trees of S sequences, by one kernel.

    Args:
        candidates: Tokens and logs of their confidences after P parents of each tree, int64 and
            float32 ``[S P, w]``.
        above: Scores of the parents, float64 ``[S, P]``.
        last: Index of the worst node that fits each budget, int64 ``[S, 1]``.
        tables: Tokens and parents, int64 ``[S, N]``, and scores and logs of all nodes, float64
            ``[2, S, N]``; the new nodes are written to them.
        paths: Paths of all nodes to themselves, bool ``[S, N, N]``, which the kernel writes too;
            None: they are not wanted.
        first: Number of the first new node.
        size: Number of new nodes.
        min_score: Nodes with a lower score are not expanded.
        chain: Whether confidences raise the log of an only child.
        confidences: Logs of a confidence head, float64 ``[S, P]``.

    Returns:
        Scores of the new nodes, -inf for those that are not expanded, float64 ``[S, size]``.
    """
    ids, logs = candidates
    tokens, parents, scores = tables
    trees, nodes = tokens.shape
    chosen = torch.empty(trees, size, dtype=torch.float64, device=tokens.device)
    count, width = len(ids) // trees, ids.shape[1]
    grow_level[(trees,)](
        ids, logs, above, above if confidences is None else confidences.contiguous(), last, tokens,
        parents, scores, tokens if paths is None else paths.view(torch.uint8), chosen, trees,
        first, count, width, size, nodes, MIN_SCORE=min_score, CHAIN=chain,
        CONFIDENT=confidences is not None, PATHS=paths is not None,
        CANDIDATES=_room(count * width, 64), ROOM=_room(size, 16), BEFORE=_room(first, 64),
    )  # fmt: skip
    return chosen


def _room(count: int, min_room: int) -> int:
    """Return a power of two of which ``count`` are at most as many. Small ones are all equal: one
    kernel for most levels, and a block takes as long as one of a few elements."""
    return max(min_room, int(triton.next_power_of_2(count)))
