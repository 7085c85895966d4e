"""KV tensors and hidden states to bytes and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.v1 import kv_pb2

WIRE_TYPES = {
    kv_pb2.KV_DTYPE_FLOAT32: torch.float32,
    kv_pb2.KV_DTYPE_FLOAT16: torch.float16,
    kv_pb2.KV_DTYPE_BFLOAT16: torch.bfloat16,
    kv_pb2.KV_DTYPE_INT8: torch.int8,
    kv_pb2.KV_DTYPE_FLOAT8_E4M3: torch.float8_e4m3fn,
}
"""All types that KV can have on the wire."""

SCALED = {kv_pb2.KV_DTYPE_INT8: 127.0, kv_pb2.KV_DTYPE_FLOAT8_E4M3: 448.0}
"""Those that come with a scale a head and position, and the largest number they hold."""


def position_bytes(heads: int, head_dim: int, wire: kv_pb2.KvDtype) -> int:
    """Bytes of keys and values of one position of one layer, scales included."""
    scale = 4 if wire in SCALED else 0
    return 2 * heads * (head_dim * WIRE_TYPES[wire].itemsize + scale)


def encode(plane: Tensor, wire: kv_pb2.KvDtype) -> tuple[bytes, list[float]]:
    """Keys or values ``[heads, n, D]`` as row-major bytes, and their scales ``[heads, n]``.

    Scales are empty for types without. A row of zeros has the scale 0.
    """
    scales: list[float] = []
    if wire in SCALED:
        plane = plane.float()
        scale = plane.abs().amax(-1, keepdim=True) / SCALED[wire]
        scales = scale.flatten().tolist()
        plane = plane / scale.clamp(min=torch.finfo(torch.float32).tiny)
        if wire == kv_pb2.KV_DTYPE_INT8:
            plane = plane.round()
    dense = plane.to(WIRE_TYPES[wire]).contiguous()
    return dense.view(torch.uint8).numpy().tobytes(), scales


def decode(
    data: bytes,
    scales: Sequence[float],
    shape: tuple[int, int, int],
    wire: kv_pb2.KvDtype,
    dtype: torch.dtype,
) -> Tensor:
    """The opposite of :func:`encode`: ``[heads, n, D]`` in ``dtype``.

    Raises:
        ValueError: Bytes or scales are not as many as the shape asks for.
    """
    heads, positions, dim = shape
    kind = WIRE_TYPES[wire]
    if len(data) != heads * positions * dim * kind.itemsize:
        raise ValueError(f"{len(data)} bytes cannot be {shape} of {kind}")
    if len(scales) != (heads * positions if wire in SCALED else 0):
        raise ValueError(f"{len(scales)} scales do not fit {shape} of {kind}")
    plane = torch.frombuffer(bytearray(data), dtype=kind).view(shape)
    if wire in SCALED:
        plane = plane.float() * torch.tensor(scales).view(heads, positions, 1)
    return plane.to(dtype)


def encode_rows(rows: Tensor) -> bytes:
    """Hidden states ``[n, hidden]`` as row-major bytes, in their own type."""
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def decode_rows(data: bytes, count: int, hidden: int, wire: kv_pb2.KvDtype) -> Tensor:
    """The opposite of :func:`encode_rows`, ``[count, hidden]``.

    Raises:
        ValueError: Bytes are not as many as the shape asks for, or the type is none of rows.
    """
    if wire not in WIRE_TYPES or wire in SCALED:
        raise ValueError(f"hidden states cannot have the type number {wire}")
    kind = WIRE_TYPES[wire]
    if len(data) != count * hidden * kind.itemsize or not data:
        raise ValueError(f"{len(data)} bytes cannot be {count} rows of {hidden} of {kind}")
    return torch.frombuffer(bytearray(data), dtype=kind).view(count, hidden)
