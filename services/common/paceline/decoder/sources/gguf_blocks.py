"""Tensors of GGUF files as tensors of torch or as blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize
from torch import Tensor

from paceline.decoder.errors import UnsupportedModelError
from paceline.decoder.sources.gguf_file import Bytes, GgufFile, GgufTensor
from paceline.kernels.blocks import BLOCK, Blocks, check_finite, concatenate, quantise

Floats = np.ndarray[Any, np.dtype[np.float32]]
Parts = tuple[Bytes, Floats, Floats | None]

_CHUNK = 1 << 20  # weights decoded at a time, which bounds the temporaries
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def decode(file: GgufFile, tensor: GgufTensor) -> Tensor | Blocks:
    """The values of a tensor: a matrix of a supported format as it is, others converted.

    F32, F16 and BF16 become tensors of that type. A matrix of Q8_0, Q4_0, Q4_1 or Q4_K becomes
    blocks with exactly its values, any other format 8-bit blocks. A vector becomes float32.

    Raises:
        UnsupportedModelError: The ``gguf`` package cannot decode the format, or a scale is not
            finite.
    """
    if tensor.kind in _FLOATS:
        flat = torch.frombuffer(bytearray(tensor.data), dtype=_FLOATS[tensor.kind])
        return flat.view(tensor.shape)
    check_format(file, tensor)
    if len(tensor.shape) != 2:
        values = dequantize(_rows(tensor), tensor.kind).reshape(tensor.shape)
        return torch.from_numpy(values)
    rows = _rows(tensor)
    step = max(1, _CHUNK // tensor.shape[1])
    starts = range(0, len(rows), step)
    try:
        with np.errstate(all="ignore"):
            found = concatenate([_blocks(rows[i : i + step], tensor.kind) for i in starts])
        check_finite(found.scale, found.minimum)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name!r} is damaged: {error}"
        ) from error
    return found


def converts(kind: GGMLQuantizationType) -> bool:
    """Whether a matrix of this format becomes 8-bit blocks of other values."""
    return kind not in _FLOATS and kind not in _EXACT


def check_format(file: GgufFile, tensor: GgufTensor) -> None:
    """Refuse a format that the ``gguf`` package cannot decode.

    Raises:
        UnsupportedModelError: It cannot.
    """
    if tensor.kind in _FLOATS or tensor.kind in _EXACT:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
    except NotImplementedError as error:
        exact = ", ".join(kind.name for kind in (*_FLOATS, *_EXACT))
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name!r} has the format {tensor.kind.name}, which is not "
            f"supported; expected {exact}, or one that the gguf package decodes, such as Q6_K"
        ) from error


def _rows(tensor: GgufTensor) -> Bytes:
    """The bytes of a tensor, a row of the matrix each."""
    return tensor.data.reshape(-1, len(tensor.data) // int(np.prod(tensor.shape[:-1])))


def _blocks(rows: Bytes, kind: GGMLQuantizationType) -> Blocks:
    """Rows of a matrix as blocks, from their bytes."""
    if kind not in _EXACT:
        return quantise(torch.from_numpy(dequantize(rows, kind)), 8)
    split, bits, offset = _EXACT[kind]
    outs = len(rows)
    values, scale, minimum = split(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    ins = values.size // outs
    return Blocks(
        torch.from_numpy(values.reshape(outs, ins)),
        torch.from_numpy(scale.reshape(outs, ins // BLOCK)),
        None if minimum is None else torch.from_numpy(minimum.reshape(outs, ins // BLOCK)),
        bits,
        offset,
    )


def _halves(raw: Bytes) -> Floats:
    """float16 numbers ``[n, 2 * m]`` in bytes, as float32 ``[n, m]``."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Bytes ``[..., n]`` to ``[..., 2 * n]``: all low halves, then all high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _split_q8_0(raw: Bytes) -> Parts:
    return raw[:, 2:] ^ np.uint8(128), _halves(raw[:, :2]), None


def _split_q4_0(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 2:]), _halves(raw[:, :2]), None


def _split_q4_1(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 4:]), _halves(raw[:, :2]), _halves(raw[:, 2:4])


def _split_q4_k(raw: Bytes) -> Parts:
    """256 weights: 8 blocks with 6-bit scales and minima, times a float16 each for all."""
    scale, minimum = Q4_K.get_scale_min(raw[:, 4:16])
    d, lowest = _halves(raw[:, :2]), _halves(raw[:, 2:4])
    scales, minima = d * scale.astype(np.float32), -(lowest * minimum.astype(np.float32))
    return _nibbles(raw[:, 16:].reshape(-1, 4, BLOCK)), scales, minima


_EXACT: dict[GGMLQuantizationType, tuple[Callable[[Bytes], Parts], Literal[8, 4], int]] = {
    GGMLQuantizationType.Q8_0: (_split_q8_0, 8, 128),
    GGMLQuantizationType.Q4_0: (_split_q4_0, 4, 8),
    GGMLQuantizationType.Q4_1: (_split_q4_1, 4, 0),
    GGMLQuantizationType.Q4_K: (_split_q4_k, 4, 0),
}
"""Formats that are blocks as they are: how to split their bytes, bits, and offset."""
