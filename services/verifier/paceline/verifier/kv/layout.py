"""Memory layout of the KV of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels.caches import row_width
from paceline.kv.segment import HEADER_BYTES

BLOCK_TOKENS = 256
"""Memory is reserved, and capacities are rounded up, in steps of this many tokens."""

TREE_TOKENS = 256
"""Slots behind the longest text for the nodes of one tree, anchor included."""


def round_up(tokens: int) -> int:
    """Returns the next multiple of ``BLOCK_TOKENS``."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True)
class KvLayout:
    """Shape of the KV of one model: planes of ``[capacity, row_width]`` by layer, kind and head.

    The planes are in the order ``[layers, 2 (keys, values), kv_heads]``, so that each of them is
    contiguous in tokens and one gather moves a path of all layers. The header precedes the first.

    Attributes:
        layers: Decoder layers.
        kv_heads: Key/value heads per layer.
        head_dim: Elements per head.
        dtype: Type of keys and values; int8 as in :mod:`paceline.kernels.caches`.
        hidden: Elements of a hidden state.
        hidden_dtype: Type of hidden states.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    hidden: int = 0
    hidden_dtype: torch.dtype = torch.float32

    @property
    def planes(self) -> int:
        """Number of planes."""
        return self.layers * 2 * self.kv_heads

    @property
    def row_width(self) -> int:
        """Elements of one token in one plane."""
        return row_width(self.head_dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.row_width * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return self.planes * self.row_bytes

    def capacity(self, text_tokens: int) -> int:
        """Returns the slots for a text of up to ``text_tokens`` and one tree behind it."""
        return round_up(text_tokens) + TREE_TOKENS

    def byte_size(self, capacity: int) -> int:
        """Returns the bytes of a cache of ``capacity`` slots, header included."""
        return HEADER_BYTES + capacity * self.token_bytes

    def offset(self, plane: int, capacity: int) -> int:
        """Returns the start of a plane. Unit: bytes from the start of the file."""
        return HEADER_BYTES + plane * capacity * self.row_bytes
