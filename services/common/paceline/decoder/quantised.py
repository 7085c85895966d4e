"""Weights in the format of a configuration: plain tensors, or blocks of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.decoder.errors import UnsupportedModelError
from paceline.kernels.blocks import Blocks, concatenate, quantise

if TYPE_CHECKING:
    from paceline.decoder.config import DecoderConfig

Weight = Tensor | Blocks

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Matrices that keep 8 bits in a 4-bit model: 4 bits there alone cost as
much as Q4_1 of everything (on SmolLM2-135M a KL divergence of 0.06)."""

_BITS = {"int8": 8, "int4": 4}


class WeightsOf(Mapping[str, Weight]):
    """Tensors by name, each converted to the format of a configuration when it is read.

    int8 and int4 quantise every matrix; blocks of as many bits or fewer stay as they are. Vectors
    (norms, biases) stay plain tensors.
    """

    def __init__(
        self, stored: Mapping[str, Weight], config: DecoderConfig, device: torch.device
    ) -> None:
        """Take tensors as they are stored, of any type."""
        self._stored = stored
        self._weights, self._dtype, self._device = config.weights, config.dtype, device

    def __getitem__(self, name: str) -> Weight:
        found = self._stored[name]
        bits = _BITS.get(self._weights, 0)
        if len(found.shape) != 2:
            return found.to(self._device) if isinstance(found, Tensor) else found
        if bits == 4 and name in VOCABULARY:
            bits = 8
        if bits and not (isinstance(found, Blocks) and found.bits <= bits):
            found = _quantise(name, plain(found, torch.float32), bits)
        quantised = self._weights not in ("float32", "bfloat16") and self._device.type == "cpu"
        if isinstance(found, Blocks) and quantised:
            return found
        return plain(found, self._dtype).to(self._device)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight as a tensor of a type."""
    return (weight.dequantise() if isinstance(weight, Blocks) else weight).to(dtype)


def fuse(parts: Sequence[Weight]) -> Weight:
    """One matrix with the rows of several; if some are blocks, the others become 8-bit blocks."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return tensors[0] if len(parts) == 1 else torch.cat(tensors)
    blocks = [part if isinstance(part, Blocks) else quantise(part, 8) for part in parts]
    return blocks[0] if len(parts) == 1 else concatenate(blocks)


def _quantise(name: str, weight: Tensor, bits: int) -> Blocks:
    try:
        return quantise(weight, bits)
    except ValueError as error:
        raise UnsupportedModelError(
            f"tensor {name!r} cannot be quantised to {bits} bits: {error}"
        ) from error
