"""The wire format of keys, values and hidden states, and the numeric types of KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.caches import SCALE_BYTES, row_width
from paceline.v1 import kv_pb2

STATE_TYPES = {
    kv_pb2.KV_DTYPE_FLOAT32: torch.float32,
    kv_pb2.KV_DTYPE_BFLOAT16: torch.bfloat16,
}  # torch types that hidden states can have
KV_TYPES = {**STATE_TYPES, kv_pb2.KV_DTYPE_INT8: torch.int8}
"""torch types that keys and values can have, in a cache and on the wire."""


def cache_dtype(dtype: torch.dtype) -> kv_pb2.KvDtype:
    """Return the protocol's number of a cache's type."""
    return next(number for number, known in KV_TYPES.items() if known == dtype)


def position_bytes(heads: int, head_dim: int, wire: kv_pb2.KvDtype) -> int:
    """Return the bytes of keys, values and scales of one position of one layer."""
    return 2 * heads * row_width(head_dim, KV_TYPES[wire]) * KV_TYPES[wire].itemsize


def encode(plane: Tensor) -> tuple[bytes, list[float]]:
    """Encode the rows of keys or values of a cache, ``[heads, n, width]`` on the CPU, in their own
    type; see :mod:`paceline.kernels.caches`. Returns row-major bytes ``[heads, n, D]``, and the
    scales, row-major ``[heads, n]``; none for types without scales."""
    scales: list[float] = []
    if plane.dtype is torch.int8:
        plane, bits = plane.split((plane.shape[2] - SCALE_BYTES, SCALE_BYTES), -1)
        scales = bits.contiguous().view(torch.float32).flatten().tolist()
    return plane.contiguous().view(torch.uint8).numpy().tobytes(), scales


def decode(
    data: bytes,
    scales: Sequence[float],
    shape: tuple[int, int, int],
    wire: kv_pb2.KvDtype,
    dtype: torch.dtype,
) -> Tensor:
    """Decode what :func:`encode` returned, to ``[heads, n, D]`` in ``dtype``. Raises
    ``ValueError``: the number of bytes or scales does not fit the shape."""
    heads, positions, dim = shape
    kind = KV_TYPES[wire]
    if len(data) != heads * positions * dim * kind.itemsize:
        raise ValueError(f"{len(data)} bytes cannot be {shape} of {kind}")
    if len(scales) != (heads * positions if kind is torch.int8 else 0):
        raise ValueError(f"{len(scales)} scales do not fit {shape} of {kind}")
    plane = torch.frombuffer(bytearray(data), dtype=kind).view(shape)
    if kind is torch.int8:
        plane = plane.float() * torch.tensor(scales).view(heads, positions, 1)
    return plane.to(dtype)


def encode_rows(rows: Tensor) -> bytes:
    """Return hidden states ``[n, hidden]`` as row-major bytes, in their own type."""
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def decode_rows(data: bytes, count: int, hidden: int, wire: kv_pb2.KvDtype) -> Tensor:
    """Decode what :func:`encode_rows` returned, to ``[count, hidden]``. Raises ``ValueError``: the
    number of bytes does not fit the shape, or a cache cannot have this type."""
    if wire not in STATE_TYPES:
        raise ValueError(f"hidden states cannot have the type number {wire}")
    kind = STATE_TYPES[wire]
    if len(data) != count * hidden * kind.itemsize or not data:
        raise ValueError(f"{len(data)} bytes cannot be {count} rows of {hidden} of {kind}")
    return torch.frombuffer(bytearray(data), dtype=kind).view(count, hidden)
