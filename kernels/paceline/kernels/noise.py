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
machine. numpy's and a GPU's may differ from them in the last bit of a float64, and after rounding
to float32 in about one of 10^8 values.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels._native import library

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)
_BLOCK = 8192  # ids per pass: the working arrays fit the L2 cache

_U64 = NDArray[np.uint64]


def philox(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10 of many counters.

    Args:
        counter: uint32 ``[4, n]``, one counter a column.
        key: Two 32-bit words.

    Returns:
        uint32 ``[4, n]``.
    """
    even = counter[[0, 2]].astype(np.uint64)
    odd = counter[[1, 3]].astype(np.uint64)
    even, odd = _rounds(even, odd, key)
    return np.stack([even[0], odd[0], even[1], odd[1]]).astype(np.uint32)


def philox_words(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """:func:`philox` of one counter in Python integers, much faster than with arrays."""
    a, b, c, d = counter
    for round_ in range(_ROUNDS):
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            high >> 32 ^ b ^ (key[0] + round_ * 0x9E3779B9) & 0xFFFFFFFF,
            high & 0xFFFFFFFF,
            low >> 32 ^ d ^ (key[1] + round_ * 0xBB67AE85) & 0xFFFFFFFF,
            low & 0xFFFFFFFF,
        )
    return a, b, c, d


def gumbel_noise(seed: int, position: int, vocab: int) -> Tensor:
    """Noise of every token id at one position.

    Args:
        seed: Unsigned 64-bit seed.
        position: Absolute position of the token to be drawn, 0 or more.
        vocab: Number of ids.

    Returns:
        float32 ``[vocab]`` on the CPU, standard Gumbel distributed.

    Raises:
        ValueError: Seed or position out of range.
    """
    _check(seed, position)
    return torch.from_numpy(_gumbel(seed, position, np.arange(vocab)))


def gumbel_noise_at(seed: int, position: int, ids: Tensor) -> Tensor:
    """Noise of some token ids at one position: ``gumbel_noise(seed, position, V)[ids]``.

    Args:
        seed: Unsigned 64-bit seed.
        position: Absolute position, 0 or more.
        ids: Token ids, int64 ``[n]``.

    Returns:
        float32 ``[n]`` on the CPU.

    Raises:
        ValueError: Seed or position out of range.
    """
    _check(seed, position)
    tokens = np.ascontiguousarray(ids.cpu().numpy())
    return torch.from_numpy(_gumbel(seed, position, tokens))


def _check(seed: int, position: int) -> None:
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}, expected an unsigned 64-bit integer")
    if not 0 <= position < 1 << 64:
        raise ValueError(f"position is {position}, expected 0 to 2**64 - 1")


def _gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    native = library()
    out = np.empty(ids.size, dtype=np.float32)
    if native is None:
        for begin in range(0, ids.size, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            out[block] = _slow_gumbel(_slow_mantissas(seed, position, ids[block]))
        return out
    native.paceline_gumbel(
        *map(ctypes.c_uint64, (seed, position)),
        ctypes.c_void_p(ids.ctypes.data),
        ctypes.c_int64(ids.size),
        ctypes.c_void_p(out.ctypes.data),
    )
    return out


def _slow_mantissas(seed: int, position: int, ids: NDArray[np.int64]) -> _U64:
    """The 52-bit integers k of token ids, in numpy."""
    even = np.empty((2, ids.size), dtype=np.uint64)
    even[0] = position & 0xFFFFFFFF
    even[1] = ids >> 1
    odd = np.zeros((2, ids.size), dtype=np.uint64)
    odd[0] = position >> 32
    even, odd = _rounds(even, odd, (seed & 0xFFFFFFFF, seed >> 32))
    even <<= np.uint64(20)
    odd >>= np.uint64(12)
    even |= odd
    chosen: _U64 = np.where(ids & 1, even[1], even[0])
    return chosen


def _rounds(even: _U64, odd: _U64, key: tuple[int, int]) -> tuple[_U64, _U64]:
    """Ten rounds on words (0, 2) in ``even`` and (1, 3) in ``odd``; overwrites both arrays.

    Both multiplications of a round are one array operation; reversing the rows swaps the two halves
    at the end of a round.
    """
    product = np.empty_like(even)
    words = np.array([[[key[0]], [key[1]]]], dtype=np.uint64) + _WEYL_STEPS
    words &= _LOW
    for word in words:
        np.multiply(even, _MULTIPLIERS, out=product)
        odd ^= word
        np.right_shift(product, _HIGH_SHIFT, out=even)
        even = even[::-1]
        even ^= odd
        np.bitwise_and(product, _LOW, out=odd)
        odd = odd[::-1]
    return even, odd


def _slow_gumbel(mantissas: _U64) -> NDArray[np.float64]:
    u = mantissas.astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return u
