"""Gumbel noise as a pure function of (seed, position, token id).

The exact layout, with which any implementation gives the same bits:

- Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
- Key: ``(seed & 0xFFFFFFFF, seed >> 32)``, seed an unsigned 64-bit integer.
- Counter: ``(t & 0xFFFFFFFF, t >> 32, v >> 1, 0)`` for absolute position t and token id v.
- The four output words w0..w3 serve two ids: an even v takes the pair ``(w0, w1)``, an odd v
  ``(w2, w3)``. With the pair ``(a, b)``: ``k = (a << 20) | (b >> 12)``, 52 bits.
- ``u = (k + 0.5) * 2**-52``, exact in float64 and strictly between 0 and 1, so that both logarithms
  are finite and the tail near 1 is kept (largest g: 36.7).
- ``g = float32(-log(-log(u)))``, both logarithms in float64.

The compiled kernels take the logarithms of ``native/sampling.c``, which have the same bits on every
machine. A GPU's may differ from them in the last bit of a float64, and after rounding to float32 in
about one of 10^8 values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels._native import library

_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Return Philox4x32-10 of four 32-bit words, Python integers or uint64 arrays for many
    counters, by a key of two words: four 32-bit words like the counter's."""
    a, b, c, d = counter
    for round_ in range(_ROUNDS):
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            high >> 32 ^ b ^ (key[0] + round_ * 0x9E3779B9) & _LOW,
            high & _LOW,
            low >> 32 ^ d ^ (key[1] + round_ * 0xBB67AE85) & _LOW,
            low & _LOW,
        )
    return a, b, c, d


def gumbel_noise_at(seed: int, position: int, ids: Tensor) -> Tensor:
    """Return the noise of token ids, int64 ``[n]``, at an absolute position: float32 ``[n]`` on the
    CPU, standard Gumbel distributed. Raises ``ValueError`` unless seed and position are unsigned
    64-bit integers."""
    check_range(seed, position)
    return torch.from_numpy(_gumbel(seed, position, np.ascontiguousarray(ids.cpu().numpy())))


def check_range(seed: int, position: int) -> None:
    """Raise ``ValueError`` unless both are unsigned 64-bit integers."""
    for name, number in (("seed", seed), ("position", position)):
        if not 0 <= number < 1 << 64:
            raise ValueError(f"{name} is {number}, expected an unsigned 64-bit integer")


def _gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    out = np.empty(ids.size, dtype=np.float32)
    library().paceline_gumbel(seed, position, ids.ctypes.data, ids.size, out.ctypes.data)
    return out
