"""Weights in 8 or 4 bits, scaled in blocks of 32 inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

QUANT_BLOCK = 32  # consecutive inputs that share a scale
_CHUNK = 1 << 18  # weights per piece of work: the temporaries of a search stay in the cache
_LEVELS = 15  # largest stored value of 4 bits
_STRETCHES = (-1.0, -0.5, 0.0, 0.5, 1.0)  # added to _LEVELS in the search for a 4-bit scale

# Twice the values of a float of 4 bits (E2M1), without its sign.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A quantised matrix: ``w = scale * (values - offset) + minimum``, computed in float32."""

    values: Tensor  # uint8 `[outs, ins]`, one value a byte; 0..15 for 4 bits
    scale: Tensor  # float32 `[outs, ins / 32]`
    minimum: Tensor | None  # float32 `[outs, ins / 32]`, or None for zeros
    bits: int  # 8 or 4
    offset: int  # subtracted from the stored values: 128 for 8 bits, 8 or 0 for 4 bits

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outs, ins = self.values.shape
        return outs, ins

    def dequantise(self) -> Tensor:
        """Return the weights, float32 ``[outs, ins]``: one product and one sum each, rounded."""
        outs, ins = self.shape
        weight = self.values.view(outs, ins // QUANT_BLOCK, QUANT_BLOCK).float()
        weight.sub_(self.offset).mul_(self.scale[:, :, None])
        if self.minimum is not None:
            weight.add_(self.minimum[:, :, None])
        return weight.flatten(1)

    def rows(self, order: Tensor) -> QuantisedMatrix:
        """Return the rows of the given indices, int64 ``[n]``; their weights keep their bits."""
        minimum = None if self.minimum is None else self.minimum[order]
        return replace(self, values=self.values[order], scale=self.scale[order], minimum=minimum)


def concatenate(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Return one matrix with the rows of several, whose weights keep their bits.

    Parts of several formats become 8 bits, which hold every value of 4 bits.
    """
    if len({(part.bits, part.offset) for part in parts}) > 1:
        parts = [_widen(part) for part in parts]
    minimum = None
    if any(part.minimum is not None for part in parts):
        minima = (torch.zeros_like(p.scale) if p.minimum is None else p.minimum for p in parts)
        minimum = torch.cat(list(minima))
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        minimum=minimum,
    )


def _widen(blocks: QuantisedMatrix) -> QuantisedMatrix:
    return replace(blocks, values=blocks.values + (128 - blocks.offset), bits=8, offset=128)


def quantise(weight: Tensor, bits: int) -> QuantisedMatrix:
    """Quantise a matrix ``[outs, ins]`` of any floating type; scales and minima are float16
    numbers.

    8 bits: the scale is the largest magnitude of a block / 127 (llama.cpp's Q8_0), no minimum. 4
    bits: scale and minimum (Q4_1) with the least squared error of a small search. Raises
    ``ValueError``: another number of bits, inputs that are not a multiple of 32, or weights that
    are not finite or too large for a float16 scale.
    """
    if bits not in (8, 4):
        raise ValueError(f"weights are quantised to 8 or 4 bits, not {bits}")
    outs, ins = weight.shape
    if ins % QUANT_BLOCK:
        raise ValueError(
            f"{ins} inputs are not a multiple of {QUANT_BLOCK}; such a matrix has no blocks"
        )
    values = torch.empty(outs, ins, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(outs, ins // QUANT_BLOCK, device=weight.device)
    minimum = torch.empty_like(scale) if bits == 4 else None
    step = max(1, _CHUNK // ins)
    for start in range(0, outs, step):
        part = slice(start, start + step)
        # A block is a column: reductions over dimension 0 are vectorised over the blocks.
        x = weight[part].float().reshape(-1, QUANT_BLOCK).T.contiguous()
        shape = scale[part].shape
        if minimum is None:
            q, d = _quantise8(x)
        else:
            q, d, m = _quantise4(x)
            minimum[part] = m.view(shape)
        scale[part] = d.view(shape)
        values[part] = q.T.reshape(-1, ins)
    check_finite(scale, minimum)
    return QuantisedMatrix(values, scale, minimum, bits, 128 if bits == 8 else 0)


def mxfp4(values: Tensor, exponents: Tensor) -> QuantisedMatrix:
    """Return a matrix of MXFP4 (OCP Microscaling Formats 1.0, 2023) as 8-bit blocks of the same
    values: of uint8 ``[outs, ins]``, floats of 4 bits, and uint8 ``[outs, ins / 32]``, exponents of
    powers of two; 127 for 1, 255 for NaN."""
    table = torch.tensor([*_DOUBLED, *(-value for value in _DOUBLED)]).add(128).to(torch.uint8)
    scale = torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - 127)
    scale = torch.where(exponents == 255, torch.nan, scale)
    return QuantisedMatrix(table[values.long()], scale, None, 8, 128)


def check_finite(scale: Tensor, minimum: Tensor | None) -> None:
    """Refuse scales and minima that are not finite. Raises ``ValueError``: one is not."""
    if not (scale.isfinite().all() and (minimum is None or minimum.isfinite().all())):
        raise ValueError("a weight is not finite or too large for a float16 scale")


def _quantise8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(0) / 127
    q = x * _inverse(scale)
    q.add_(torch.copysign(torch.tensor(0.5), q)).trunc_().add_(128)  # halves away from zero
    return q.to(torch.uint8), _half(scale)


def _quantise4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best of several scales, each improved by a least-squares fit to its values."""
    low, high, mean = x.amin(0), x.amax(0), x.mean(0)
    best_error = torch.full_like(low, torch.inf)
    best_q = torch.zeros_like(x)
    best_scale, best_minimum = torch.full_like(low, torch.nan), torch.full_like(low, torch.nan)
    for stretch in _STRETCHES:
        spread = _nearest(x, (high - low) / (_LEVELS + stretch), low)
        q_mean = spread.mean(0)
        spread -= q_mean
        scale = _half((spread * x).sum(0) * _inverse(spread.square_().sum(0)))
        minimum = _half(mean - scale * q_mean)
        q = _nearest(x, scale, minimum)
        error = (q * scale).add_(minimum).sub_(x).square_().sum(0)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_q = torch.where(better, q, best_q)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_q.to(torch.uint8), best_scale, best_minimum


def _nearest(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return (x - minimum).mul_(_inverse(scale)).round_().clamp_(0, _LEVELS)


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, 1 / x)


def _half(x: Tensor) -> Tensor:
    """Rounded to float16, as float32."""
    return x.half().float()
