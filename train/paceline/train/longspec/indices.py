"""Anchor-offset indices (LongSpec, section 3.2 and algorithm 1)."""

import torch
from torch import Tensor

SINKS = 4
"""Positions that stay where they are: attention sinks."""


def offset_positions(rows: int, length: int, context: int) -> Tensor:
    """Positions of `rows` short texts, int64 [rows, length], that reach all over a long context.

    The first four are 0 to 3, the others follow one another from a random offset on, drawn for
    each row from torch's global generator, so that the last is at most `context` - 1. Raises
    ValueError where a text is longer than the context.
    """
    if length > context:
        raise ValueError(f"a row of {length} tokens does not fit a context of {context}")
    positions = torch.arange(length).repeat(rows, 1)
    offsets = torch.randint(0, context - length + 1, (rows, 1))
    positions[:, SINKS:] += offsets
    return positions
