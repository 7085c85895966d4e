"""Tokens of a whole batch, chosen where its logits are."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from paceline.kernels import SamplingParams, choose_tokens
from paceline.verifier.engine.batch import Share


def choose_ahead(shares: Items[Share], logits: Tensor) -> dict[int, Items[int]]:
    """Tokens behind every node of a batch in one go, where its logits are on a GPU.

    There a walk that looked at one row after the other would wait for a copy of each.

    Args:
        shares: Of the batch.
        logits: Of all of them, ``[rows, V]``.

    Returns:
        Tokens by the index of the share; none where penalties, rejection sampling or
        a grammar ask for more than a row, and none on the CPU.
    """
    if logits.device.type == "cpu":
        return {}
    rows: list[int] = []
    params: list[SamplingParams] = []
    positions: list[int] = []
    counts: dict[int, int] = {}
    for index, share in enumerate(shares):
        sequence = share.job.sequence
        count = share.logits.stop - share.logits.start
        sampling = sequence.generation.sampling
        alone = sampling.penalised or sampling.rejection or sequence.guide is not None
        if not count or alone:
            continue
        counts[index] = count
        rows += range(share.logits.start, share.logits.stop)
        params += [sampling] * count
        positions += [len(sequence.tokens) + depth for depth in share.tree.depths[:count]]
    if not rows:
        return {}
    if len(rows) < len(logits):
        logits = logits[torch.tensor(rows, device=logits.device)]
    tokens = iter(choose_tokens(logits, params, positions))
    return {index: [next(tokens) for _ in range(count)] for index, count in counts.items()}
