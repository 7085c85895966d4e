"""The sampling contract (:mod:`paceline.kernels.sampling`) in one kernel, a program for each row.

Filters need no sort: the k-th largest logit and the border of the nucleus are found digit by digit
in order-preserving integers of the floats, 4 bits per pass over the row. The tokens that remain
after a filter are given by a least integer and, for ties at it, a last token id.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scaled(logits, at, vocab, divisor):
    """Logits over temperature, with IEEE rounding; -inf beyond the vocabulary."""
    value = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    value = tl.math.div_rn(value, tl.full(value.shape, 1.0, tl.float32) * divisor)
    return tl.where(value == 0.0, 0.0, value)  # one zero


@triton.jit
def _ordered(value):
    """Integers in the order of the floats, int32."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _left(order, at, vocab, least, last):
    """Whether tokens remain after a filter."""
    return (at < vocab) & ((order > least) | ((order == least) & (at <= last)))


@triton.jit
def _last_tie(logits, vocab, divisor, least, last, border, count, BLOCK: tl.constexpr):
    """Id of the ``count``-th remaining token at ``border``, or the vocabulary's size."""
    found = vocab
    before = tl.full([], 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        order = _ordered(_scaled(logits, at, vocab, divisor))
        tie = ((order == border) & _left(order, at, vocab, least, last)).to(tl.int32)
        rank = before + tl.cumsum(tie, 0)
        found = tl.minimum(found, tl.min(tl.where((tie > 0) & (rank == count), at, vocab), 0))
        before += tl.sum(tie, 0)
    return found


@triton.jit
def _narrower(least, last, border, tie):
    """The next filter's limits; the last one's if the next would keep all that remain."""
    return tl.maximum(border, least), tl.where(border < least, last, tie)


@triton.jit
def _best_k(logits, vocab, divisor, least, last, k, BLOCK: tl.constexpr):
    """Least integer and last id of the ``k`` best remaining tokens."""
    digits = tl.arange(0, 16)
    border = tl.full([], -2147483648, tl.int32)
    for level in range(8):
        goals = border + (digits << (28 - 4 * level))
        counts = tl.zeros([16], tl.int32)
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            order = _ordered(_scaled(logits, at, vocab, divisor))
            kept = _left(order, at, vocab, least, last)
            over = (order[:, None] >= goals[None, :]) & kept[:, None]
            counts += tl.sum(over.to(tl.int32), 0)
        border = tl.max(tl.where(counts >= k, goals, border), 0)
    above = tl.full([], 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        order = _ordered(_scaled(logits, at, vocab, divisor))
        above += tl.sum(((order > border) & _left(order, at, vocab, least, last)).to(tl.int32), 0)
    ties = tl.maximum(k - above, 1)
    tie = _last_tie(logits, vocab, divisor, least, last, border, ties, BLOCK)
    return _narrower(least, last, border, tie)


@triton.jit
def _nucleus(logits, vocab, divisor, least, last, highest, mass, BLOCK: tl.constexpr):
    """Least integer and last id of the smallest set of best tokens with this probability."""
    total = tl.full([], 0.0, tl.float64)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = _scaled(logits, at, vocab, divisor)
        kept = _left(_ordered(value), at, vocab, least, last)
        weight = tl.exp(value.to(tl.float64) - highest)
        total += tl.sum(tl.where(kept, weight, 0.0), 0)
    normal = (highest + tl.log(total)).to(tl.float32).to(tl.float64)
    digits = tl.arange(0, 16)
    border = tl.full([], -2147483648, tl.int32)
    for level in range(8):
        goals = border + (digits << (28 - 4 * level))
        masses = tl.zeros([16], tl.float64)
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = _scaled(logits, at, vocab, divisor)
            order = _ordered(value)
            kept = _left(order, at, vocab, least, last)
            weight = tl.where(kept, tl.exp(value.to(tl.float64) - normal), 0.0)
            masses += tl.sum(tl.where(order[:, None] >= goals[None, :], weight[:, None], 0.0), 0)
        border = tl.max(tl.where(masses >= mass, goals, border), 0)
    above = tl.full([], 0.0, tl.float64)
    one = tl.full([], 0.0, tl.float64)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = _scaled(logits, at, vocab, divisor)
        order = _ordered(value)
        kept = _left(order, at, vocab, least, last)
        weight = tl.where(kept, tl.exp(value.to(tl.float64) - normal), 0.0)
        above += tl.sum(tl.where(order > border, weight, 0.0), 0)
        one = tl.maximum(one, tl.max(tl.where(order == border, weight, 0.0), 0))
    ties = tl.ceil((mass - above) / tl.where(one > 0.0, one, 1.0))
    ties = tl.maximum(tl.minimum(ties, 2.0e9), 1.0).to(tl.int32)
    tie = _last_tie(logits, vocab, divisor, least, last, border, ties, BLOCK)
    return _narrower(least, last, border, tie)


@triton.jit
def _gumbel(seed, position, at):
    """Noise of token ids: the layout that :mod:`paceline.kernels.noise` documents."""
    low = tl.full(at.shape, 0, tl.uint32) + (position & 0xFFFFFFFF).to(tl.uint32)
    high = tl.full(at.shape, 0, tl.uint32) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    none = tl.full(at.shape, 0, tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, (at >> 1).to(tl.uint32), none, 10)
    odd = (at & 1) != 0
    first = tl.where(odd, w2, w0).to(tl.int64)
    second = tl.where(odd, w3, w1).to(tl.int64)
    mantissa = (first << 20) | (second >> 12)
    uniform = (mantissa.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["vocab"])
def choose_rows(logits, tokens, integers, floats, vocab, stride, BLOCK: tl.constexpr):
    """The token of one row.

    ``integers`` int64 ``[R, 6]``: seed, position, top_k (0: all), and three floats. ``floats`` is
    the same memory as float64: temperature, logarithm of min_p, top_p. ``tokens`` int64 ``[R]``.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    seed = tl.load(integers + row * 6)
    position = tl.load(integers + row * 6 + 1)
    k = tl.load(integers + row * 6 + 2)
    temperature = tl.load(floats + row * 6 + 3).to(tl.float32)
    log_min_p = tl.load(floats + row * 6 + 4).to(tl.float32)
    mass = tl.load(floats + row * 6 + 5)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)

    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        top = tl.maximum(top, _scaled(logits, begin + tl.arange(0, BLOCK), vocab, divisor))
    highest = tl.max(top, 0)
    least = _ordered(tl.where(greedy, float("-inf"), highest + log_min_p))
    last = vocab
    if (k > 0) & (greedy == 0):
        least, last = _best_k(logits, vocab, divisor, least, last, k, BLOCK)
    if (mass < 1.0) & (greedy == 0):
        least, last = _nucleus(
            logits, vocab, divisor, least, last, highest.to(tl.float64), mass, BLOCK
        )

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], 0, tl.int32) + vocab
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = _scaled(logits, at, vocab, divisor)
        kept = _left(_ordered(value), at, vocab, least, last)
        if greedy == 0:
            value += _gumbel(seed, position, at)
        value = tl.where(kept, value, float("-inf"))
        better = kept & ((value > best) | (ids == vocab))
        best = tl.where(better, value, best)
        ids = tl.where(better, at, ids)
    winner = tl.max(best, 0)
    tl.store(tokens + row, tl.min(tl.where(best == winner, ids, vocab), 0).to(tl.int64))
