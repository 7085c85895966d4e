"""Reduced vocabularies: only the most frequent tokens are drafted (EAGLE-3, section 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
from paceline.decoder.weights import weight_files

DRAFT_TOKENS = "d2t"
"""Name of the tensor with the target's token id of each drafted token, rising; int64 ``[R]``."""


class DraftedShape(Protocol):
    """Sizes of both vocabularies."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int: ...


def drafted_tokens(folder: Path, config: DraftedShape) -> Tensor | None:
    """Reads the target's id of each token that is drafted, int64 ``[R]``; None: all tokens.

    Raises:
        UnsupportedModelError: They are missing, or are not that many rising ids.
    """
    if not config.draft_vocab_size:
        return None
    from safetensors import safe_open

    found = torch.empty(0)
    for path in weight_files(folder):
        file: Any = safe_open(str(path), framework="pt")
        if DRAFT_TOKENS in file.keys():  # noqa: SIM118 - it is no mapping
            found = file.get_tensor(DRAFT_TOKENS)
    count, vocab = config.draft_vocab_size, config.vocab_size
    valid = found.dtype == torch.int64 and found.shape == (count,)
    if not valid or found[0] < 0 or found[-1] >= vocab or (found.diff() <= 0).any():
        raise UnsupportedModelError(
            f"{folder} has no valid tensor {DRAFT_TOKENS!r}, expected {count} rising token ids "
            f"below {vocab}"
        )
    return found


def draft_rows(drafted: Tensor | None, tokens: Tensor) -> Tensor:
    """Returns the row of each token among the drafted ones.

    Args:
        drafted: Their ids, rising, int64 ``[R]``; None: all.
        tokens: Token ids, int64 of any shape.

    Returns:
        int64 like ``tokens``; R for tokens that are not drafted.
    """
    if drafted is None:
        return tokens
    rows = torch.searchsorted(drafted, tokens.contiguous())
    found = drafted[rows.clamp(max=len(drafted) - 1)] == tokens
    return torch.where(found, rows, len(drafted))
