"""Filters and noise of the sampling contract (:mod:`paceline.kernels.sampling`).

Tokens are compared by keys: an order-preserving integer of the float, then the lower token id. No
two keys are equal, so that what a filter keeps is given by one number, the least key, its border.

``find_best`` and ``find_candidates`` look at chunks of a row: its best key, its best ``BESTS`` keys
and the sum of its probabilities. ``find_border`` searches for the border among these candidates,
bit by bit. Where top_p keeps more, ``weigh_spans``, ``collect_span`` and ``finish_border`` collect
the keys near the border and search among them. ``perturb`` adds noise to what is kept.

The ids of a chunk are spread over the row, since frequent tokens have neighbouring ids.

``sum_chances``, ``sum_residuals`` and ``accept_or_resample`` are rejection sampling. They look at
chunks of neighbouring ids, the last one at the chunk in which the drawn token lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.triton.ahead import Kernel

RUN: tl.constexpr = tl.constexpr(64)  # neighbouring ids of a chunk
ID_BITS: tl.constexpr = tl.constexpr(20)
LAST_ID: tl.constexpr = tl.constexpr((1 << 20) - 1)
LOWEST: tl.constexpr = tl.constexpr(-(1 << 51))  # at most any key
NONE: tl.constexpr = tl.constexpr(-(1 << 52))  # in the place of a key that is missing
# The largest float32: in the place of plus infinity; its negative in the place of NaN.
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _keys(logits, at, vocab, divisor):
    """Keys of the logits over temperature, with IEEE rounding; none beyond the vocabulary."""
    value = tl.load(logits + at, mask=at < vocab, other=0.0).to(tl.float32)
    value = tl.math.div_rn(value, tl.full(value.shape, 1.0, tl.float32) * divisor)
    value = tl.where(value == 0.0, 0.0, value)  # one zero
    finite = tl.where(value > 0.0, LARGEST, -LARGEST)
    value = tl.where(value <= LARGEST, value, finite)
    return tl.where(at < vocab, _key(value) | (LAST_ID - at), NONE)


@triton.jit
def _key(value):
    """The lowest key of a float."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << ID_BITS


@triton.jit
def _value(key):
    """The float of a key."""
    bits = (key >> ID_BITS).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(key, highest):
    """Probabilities in integers: see :func:`paceline.kernels.sampling._weights`."""
    below = highest - _value(key)  # NaN where both are minus infinity
    nats = (tl.where(below < 31.0, below, 31.0) * 33554432.0).to(tl.int64)
    octaves = (nats * 1549082005) >> 25
    fraction = octaves & 0x3FFFFFFF
    power = tl.full(key.shape, 123394, tl.int64)
    power = 1386885 - ((power * fraction) >> 30)
    power = 10304738 - ((power * fraction) >> 30)
    power = 59591844 - ((power * fraction) >> 30)
    power = 257940802 - ((power * fraction) >> 30)
    power = 744261112 - ((power * fraction) >> 30)
    power = 1073741824 - ((power * fraction) >> 30)
    return (power << 10) >> (octaves >> 30)


@triton.jit
def _filter(integers, floats, best, row, chunks, CHUNKS: tl.constexpr):
    """The numbers of a row: top_k, top_p, temperature, largest value and the border of min_p."""
    k = tl.load(integers + row * 6 + 2)
    temperature = tl.load(floats + row * 6 + 3).to(tl.float32)
    log_min_p = tl.load(floats + row * 6 + 4).to(tl.float32)
    mass = tl.load(floats + row * 6 + 5)
    chunk = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=NONE), 0)
    highest = _value(top)
    return k, mass, temperature, highest, _key(highest + log_min_p)


@triton.jit
def _ids_of(chunk, chunks, CHUNK: tl.constexpr):
    index = tl.arange(0, CHUNK)
    return ((index // RUN) * chunks + chunk) * RUN + index % RUN


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def find_best(logits, floats, best, vocab, stride, CHUNK: tl.constexpr):
    """The best key of each chunk, int64 ``[R, chunks]``; arguments as for :func:`perturb`."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    temperature = tl.load(floats + row * 6 + 3).to(tl.float32)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    key = _keys(logits + row * stride, _ids_of(chunk, chunks, CHUNK), vocab, divisor)
    tl.store(best + row * chunks + chunk, tl.max(key, 0))


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def find_candidates(
    logits, integers, floats, best, candidates, sums, vocab, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BESTS: tl.constexpr,
):  # fmt: skip
    """Keys of each chunk after min_p, ``[R, chunks, BESTS]``: all from a border on, then ``NONE``.

    ``sums`` int64 ``[R, 2, chunks]``: the weight of a chunk and its border. Rows without top_k and
    top_p are left out.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    k, mass, temperature, highest, lowest = _filter(integers, floats, best, row, chunks, CHUNKS)
    if (temperature > 0.0) & ((k > 0) | (mass < 1.0)):
        key = _keys(logits + row * stride, _ids_of(chunk, chunks, CHUNK), vocab, temperature)
        key = tl.where(key >= lowest, key, NONE)
        weight = tl.where(key > NONE, _weight(key, highest), 0)
        border = tl.full([], LOWEST, tl.int64)
        goals = tl.arange(0, 4)
        for level in range(8):  # the upper half of the float's bits
            step = tl.full([], 1, tl.int64) << (50 - 2 * level)
            over = (key[:, None] >= (border + goals * step)[None, :]).to(tl.int32)
            border += step * tl.sum((tl.sum(over, 0) > BESTS).to(tl.int64) * (goals > 0), 0)
        fits = tl.sum((key > NONE).to(tl.int32), 0) <= BESTS
        border = tl.where(fits, LOWEST, border + (1 << 36))
        kept = (key >= border).to(tl.int32)
        place = (row * chunks + chunk) * BESTS
        tl.store(candidates + place + tl.cumsum(kept, 0) - 1, key, mask=kept > 0)
        count = tl.sum(kept, 0)
        rest = tl.arange(0, BESTS)
        tl.store(candidates + place + rest, tl.full([BESTS], NONE, tl.int64), mask=rest >= count)
        sums += row * 2 * chunks + chunk
        tl.store(sums, tl.sum(weight, 0))
        tl.store(sums + chunks, border)


@triton.jit
def _search(
    logits, candidates, vocab, divisor, highest, lowest, needed, count, whole,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest border above which keys have the needed number or weight; else ``LOWEST``.

    Keys below ``lowest`` count nothing. ``count`` candidates are searched, or the whole row.
    """
    border = tl.full([], LOWEST, tl.int64)
    for level in range(26):  # two bits each
        step = tl.full([], 1, tl.int64) << (50 - 2 * level)
        first, second, third = needed * 0, needed * 0, needed * 0
        for begin in range(0, count, BLOCK):
            key = _source(logits, candidates, begin, vocab, divisor, lowest, count, whole, BLOCK)
            weight = _weight(key, highest) if BY_WEIGHT else tl.full([BLOCK], 1, tl.int64)
            first += tl.sum(tl.where(key >= border + step, weight, 0), 0)
            second += tl.sum(tl.where(key >= border + 2 * step, weight, 0), 0)
            third += tl.sum(tl.where(key >= border + 3 * step, weight, 0), 0)
        reached = (first >= needed).to(tl.int64) + (second >= needed) + (third >= needed)
        border += step * reached
    return border


@triton.jit
def _source(
    logits, candidates, begin, vocab, divisor, lowest, count, whole, BLOCK: tl.constexpr
):  # fmt: skip
    """Keys of the row or of its candidates; those below ``lowest`` are ``NONE``."""
    at = begin + tl.arange(0, BLOCK)
    if whole:
        key = _keys(logits, at, vocab, divisor)
    else:
        key = tl.load(candidates + at, mask=at < count, other=NONE)
    return tl.where(key >= lowest, key, NONE)


# With wide loads of rows, which it seldom reads, its registers spill; so with finish_border.
@Kernel
@triton.jit(do_not_specialize=["vocab", "stride"])
def find_border(
    logits, integers, floats, best, candidates, sums, borders, pending, vocab, stride, chunks,
    CHUNKS: tl.constexpr, BESTS: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """The least key that all filters keep, int64 ``[R]``.

    Where top_p keeps more than the candidates, it is the other filters' least key. Then ``pending``
    int64 ``[R, 3 + SPANS]`` says what is left to do: the needed weight (0: nothing), this border,
    and the borders of spans of equal width, from the least key up to the candidates.
    """
    row = tl.program_id(0).to(tl.int64)
    k, mass, temperature, highest, border = _filter(integers, floats, best, row, chunks, CHUNKS)
    pending += row * (3 + SPANS)
    tl.store(pending, 0)
    if (temperature > 0.0) & ((k > 0) | (mass < 1.0)):
        logits += row * stride
        candidates += row * chunks * BESTS
        chunk = tl.arange(0, CHUNKS)
        sums += row * 2 * chunks
        worst = tl.load(sums + chunks + chunk, mask=chunk < chunks, other=NONE)
        complete = tl.max(worst, 0)  # all keys from here on are candidates
        total = tl.sum(tl.load(sums + chunk, mask=chunk < chunks, other=0), 0)
        lowest = border
        done = (k == 0).to(tl.int32)
        for whole in range(2):
            if done == 0:
                count = vocab if whole else chunks * BESTS
                border = tl.maximum(lowest, _search(
                    logits, candidates, vocab, temperature, highest, lowest, k, count, whole,
                    False, BLOCK,
                ))  # fmt: skip
                done = (border >= complete).to(tl.int32)
                total = tl.full([], 0, tl.int64)
                for begin in range(0, count, BLOCK):
                    key = _source(
                        logits, candidates, begin, vocab, temperature, border, count, whole, BLOCK,
                    )  # fmt: skip
                    total += tl.sum(tl.where(key > NONE, _weight(key, highest), 0), 0)
        if mass < 1.0:
            needed = tl.ceil(mass * total.to(tl.float64)).to(tl.int64)
            needed = tl.maximum(tl.minimum(needed, total), 1)
            nucleus = _search(
                logits, candidates, vocab, temperature, highest, border, needed, chunks * BESTS,
                False, True, BLOCK,
            )  # fmt: skip
            if (nucleus >= complete) | (border >= complete):
                border = tl.maximum(border, nucleus)
            else:
                tl.store(pending, needed)
                tl.store(pending + 1, border)
                # All keys below the border have less weight than this: it is not far below.
                rest = (total - needed + 1).to(tl.float64) / vocab
                least = highest + tl.log(rest / 1099511627776.0).to(tl.float32)
                span = tl.arange(0, SPANS)
                value = least + (_value(complete) - least) * (span.to(tl.float32) / SPANS)
                first = tl.where(span == 0, LOWEST, tl.minimum(_key(value), complete))
                tl.store(pending + 2 + span, first)
                tl.store(pending + 2 + SPANS, complete)
    tl.store(borders + row, border)


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def weigh_spans(
    logits, integers, floats, best, pending, spans, vocab, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Weight of a chunk's keys from the end of each span on, int64 ``[R, chunks, SPANS]``."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    pending += row * (3 + SPANS)
    if tl.load(pending) > 0:
        _k, _p, temperature, highest, _b = _filter(integers, floats, best, row, chunks, CHUNKS)
        key = _keys(logits + row * stride, _ids_of(chunk, chunks, CHUNK), vocab, temperature)
        key = tl.where(key >= tl.load(pending + 1), key, NONE)
        weight = tl.where(key > NONE, _weight(key, highest), 0)
        spans += (row * chunks + chunk) * SPANS
        for number in range(SPANS):
            over = key >= tl.load(pending + 3 + number)
            tl.store(spans + number, tl.sum(tl.where(over, weight, 0), 0))


@triton.jit
def _span(pending, spans, chunks, CHUNKS: tl.constexpr, SPANS: tl.constexpr):
    """The number of the span in which the border lies, and the weight from its end on."""
    chunk, number = tl.arange(0, CHUNKS), tl.arange(0, SPANS)
    at = chunk[:, None] * SPANS + number[None, :]
    over = tl.sum(tl.load(spans + at, mask=(chunk < chunks)[:, None], other=0), 0)
    span = tl.sum((over >= tl.load(pending)).to(tl.int32), 0)
    return span, tl.sum(tl.where(number == span, over, 0), 0)


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def collect_span(
    logits, floats, pending, spans, filled, near, vocab, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPANS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The keys of the border's span, ``[R, ROOM]`` in any order, and their number ``[R]``.

    That number may be larger than the room; it begins with 0.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    pending += row * (3 + SPANS)
    if tl.load(pending) > 0:
        temperature = tl.load(floats + row * 6 + 3).to(tl.float32)
        spans += row * chunks * SPANS
        span, _above = _span(pending, spans, chunks, CHUNKS, SPANS)
        low, high = tl.load(pending + 2 + span), tl.load(pending + 3 + span)
        key = _keys(logits + row * stride, _ids_of(chunk, chunks, CHUNK), vocab, temperature)
        low = tl.maximum(low, tl.load(pending + 1))
        kept = ((key >= low) & (key < high)).to(tl.int32)
        place = tl.atomic_add(filled + row, tl.sum(kept, 0)) + tl.cumsum(kept, 0) - 1
        tl.store(near + row * ROOM + place, key, mask=(kept > 0) & (place < ROOM))


@Kernel
@triton.jit(do_not_specialize=["vocab", "stride", "chunks"])
def finish_border(
    logits, integers, floats, best, pending, spans, filled, near, borders, vocab, stride, chunks,
    CHUNKS: tl.constexpr, SPANS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The border among the keys of its span, or among all if these are too many."""
    row = tl.program_id(0).to(tl.int64)
    pending += row * (3 + SPANS)
    needed = tl.load(pending)
    if needed > 0:
        _k, _p, temperature, highest, _b = _filter(integers, floats, best, row, chunks, CHUNKS)
        spans += row * chunks * SPANS
        _number, above = _span(pending, spans, chunks, CHUNKS, SPANS)
        count = tl.load(filled + row)
        border = tl.load(pending + 1)
        whole = (count > ROOM).to(tl.int32)
        nucleus = _search(
            logits + row * stride, near + row * ROOM, vocab, temperature, highest, border,
            tl.where(whole > 0, needed, needed - above), tl.where(whole > 0, vocab, count), whole,
            True, BLOCK,
        )  # fmt: skip
        tl.store(borders + row, tl.maximum(border, nucleus))


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


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def perturb(
    logits, out, ids, integers, floats, borders, vocab, stride,
    FILTERED: tl.constexpr, REDUCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores, whose largest is the token's: float32 ``[R, vocab]``, -inf where a filter removes it.

    ``integers`` int64 ``[R, 6]``: seed, position (below 0: no noise), top_k (0: all), and three
    floats. ``floats`` is the same memory as float64: temperature, logarithm of min_p, top_p.
    ``ids``: token of each logit, where ``REDUCED``.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(integers + row * 6)
    position = tl.load(integers + row * 6 + 1)
    temperature = tl.load(floats + row * 6 + 3).to(tl.float32)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    key = _keys(logits + row * stride, at, vocab, divisor)
    score = _value(key)
    if temperature > 0.0:
        kept = at < vocab
        if FILTERED:
            kept = kept & (key >= tl.load(borders + row))
        if (position >= 0) & (tl.max(kept.to(tl.int32), 0) > 0):
            tokens = tl.load(ids + at, mask=at < vocab, other=0) if REDUCED else at
            score += _gumbel(seed, position, tokens)
        score = tl.where(kept, score, float("-inf"))
    tl.store(out + row * vocab + at, score, mask=at < vocab)


@triton.jit
def _uniform(seed, position, PURPOSE: tl.constexpr):
    """A number strictly between 0 and 1, float64; see :mod:`paceline.kernels.sampling`."""
    none = tl.full([1], 0, tl.uint32)
    low = none + (position & 0xFFFFFFFF).to(tl.uint32)
    high = none + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, _2, _3 = tl.philox(seed, low, high, none + PURPOSE, none + 1, 10)
    mantissa = (w0.to(tl.int64) << 20) | (w1.to(tl.int64) >> 12)
    return tl.sum((mantissa.to(tl.float64) + 0.5) * 2.220446049250313e-16, 0)


@triton.jit
def _chances(scores, at, vocab, highest):
    """Probabilities times their sum over the row: float64, 0 beyond the vocabulary."""
    score = tl.load(scores + at, mask=at < vocab, other=float("-inf"))
    return tl.exp(score.to(tl.float64) - highest)


@triton.jit
def _residuals(scores, q, at, vocab, highest, total, certainty):
    """max(p - q, 0), float64."""
    p = _chances(scores, at, vocab, highest) / total
    drafted = tl.load(q + at, mask=at < vocab, other=0.0).to(tl.float64) / certainty
    return tl.maximum(p - drafted, 0.0)


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def sum_chances(scores, drafts, highest, sums, vocab, BLOCK: tl.constexpr):
    """Sums of the probabilities of chunks, float64 ``[D, chunks]``.

    ``drafts`` int64 ``[D, 5]``: row of the scores, drafted token, seed, position, and as float64
    the sum of the draft's probabilities. ``highest`` float32 ``[R]``: largest scores.
    """
    draft, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(drafts + draft * 5)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    chances = _chances(scores + row * vocab, at, vocab, tl.load(highest + row).to(tl.float64))
    tl.store(sums + draft * tl.num_programs(1) + chunk, tl.sum(chances, 0))


@Kernel
@triton.jit(do_not_specialize=["vocab"])
def sum_residuals(
    scores, drafts, floats, q, highest, sums, rests, vocab,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of what p has more than q in chunks, float64 ``[D, chunks]``.

    ``floats`` is the memory of ``drafts`` as float64; ``q`` float32 ``[D, vocab]``.
    """
    draft, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    row = tl.load(drafts + draft * 5)
    numbers = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(sums + draft * chunks + numbers, mask=numbers < chunks, other=0.0), 0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    residuals = _residuals(
        scores + row * vocab, q + draft * vocab, at, vocab,
        tl.load(highest + row).to(tl.float64), total, tl.load(floats + draft * 5 + 4),
    )  # fmt: skip
    tl.store(rests + draft * chunks + chunk, tl.sum(residuals, 0))


@Kernel
@triton.jit(do_not_specialize=["vocab", "chunks"])
def accept_or_resample(
    scores, drafts, floats, q, highest, sums, rests, tokens, vocab, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The drafted token, or one of the residual, to ``tokens [R]`` of its row."""
    draft = tl.program_id(0).to(tl.int64)
    row = tl.load(drafts + draft * 5)
    token = tl.load(drafts + draft * 5 + 1)
    seed = tl.load(drafts + draft * 5 + 2)
    position = tl.load(drafts + draft * 5 + 3)
    certainty = tl.load(floats + draft * 5 + 4)
    scores += row * vocab
    q += draft * vocab
    best = tl.load(highest + row).to(tl.float64)
    chunk = tl.arange(0, CHUNKS)
    chances = tl.load(sums + draft * chunks + chunk, mask=chunk < chunks, other=0.0)
    total = tl.sum(chances, 0)
    p = tl.exp(tl.load(scores + token).to(tl.float64) - best) / total
    drafted = tl.load(q + token).to(tl.float64) / certainty
    if _uniform(seed, position, 1) * drafted >= p:
        parts = tl.load(rests + draft * chunks + chunk, mask=chunk < chunks, other=0.0)
        empty = tl.sum(parts, 0) == 0.0  # p and q are equal up to rounding
        parts = tl.where(empty, chances / total, parts)
        reached = tl.cumsum(parts, 0)
        goal = _uniform(seed, position, 2) * tl.max(reached, 0)
        # By rounding, the goal may be the sum.
        chosen = tl.minimum(
            tl.sum((reached <= goal).to(tl.int32), 0), tl.max(tl.where(parts > 0.0, chunk, 0), 0)
        )
        before = tl.sum(tl.where(chunk == chosen - 1, reached, 0.0), 0)
        index = tl.arange(0, BLOCK)
        at = chosen * BLOCK + index
        alone = _chances(scores, at, vocab, best) / total
        rest = _residuals(scores, q, at, vocab, best, total, certainty)
        weights = tl.where(empty, alone, rest)
        within = before + tl.cumsum(weights, 0)
        place = tl.minimum(
            tl.sum((within <= goal).to(tl.int32), 0), tl.max(tl.where(weights > 0.0, index, 0), 0)
        )
        token = (chosen * BLOCK + place).to(tl.int64)
    tl.store(tokens + row, token)
