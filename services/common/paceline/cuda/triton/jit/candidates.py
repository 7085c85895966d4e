"""The likeliest tokens of rows of logits, and the level of a tree that grows from them.

``best_of_chunks`` reads each logit once: it keeps the best keys of a chunk and the sum of its
exponentials, so that neither scores nor probabilities of a whole row are written. ``merge_chunks``
makes the candidates of a row of them. ``grow_level`` chooses the nodes of a level among the
candidates after all nodes of the level before, and ``pack_paths`` makes masks of their paths.

Keys are as in the sampling kernels: no two are equal, and of equal scores the lower token comes
first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.triton.ahead import Kernel
from paceline.cuda.triton.jit.sampling import ID_BITS, LAST_ID, NONE, _gumbel, _key, _keys, _value

LOWEST: tl.constexpr = tl.constexpr(-(1 << 31))  # lower than the upper half of the key of any float


@Kernel
@triton.jit(do_not_specialize=["vocab", "width"])
def best_of_chunks(
    logits, ids, integers, floats, borders, bests, sums, vocab, stride, width,
    NOISE: tl.constexpr, FILTERED: tl.constexpr, REDUCED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best keys of each chunk of a row, best first, int64 ``[R, chunks, width]``, and the sum
    of the exponentials of its scores over the largest one, float32 ``[R, chunks]``.

    Without ``NOISE`` scores are the logits, else the outputs of
    :func:`~paceline.cuda.triton.jit.sampling.perturb`, whose arguments the others are.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    temperature, divisor = 0.0, 1.0
    if NOISE:
        temperature = tl.load(floats + row * 6 + 3).to(tl.float32)
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
    key = _keys(logits + row * stride, at, vocab, divisor)
    score = tl.where(at < vocab, _value(key), float("-inf"))
    if NOISE:
        kept = at < vocab
        if temperature > 0.0:
            if FILTERED:
                kept = kept & (key >= tl.load(borders + row))
            position = tl.load(integers + row * 6 + 1)
            if (position >= 0) & (tl.max(kept.to(tl.int32), 0) > 0):
                seed = tl.load(integers + row * 6)
                tokens = tl.load(ids + at, mask=at < vocab, other=0) if REDUCED else at
                score += _gumbel(seed, position, tokens)
            score = tl.where(kept, score, float("-inf"))
            score = tl.where(score == 0.0, 0.0, score)  # one zero
    highest = tl.max(score, 0)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    place = row * tl.num_programs(1) + chunk
    tl.store(sums + place, tl.sum(tl.exp(score - finite), 0))
    # The upper half of keys, which one instruction compares.
    order = tl.where(at < vocab, (_key(score) >> ID_BITS).to(tl.int32), LOWEST)
    for index in range(width):
        best = tl.max(order, 0)
        best_at = tl.min(tl.where(order == best, at, LAST_ID), 0)
        whole = (best.to(tl.int64) << ID_BITS) | (LAST_ID - best_at)
        tl.store(bests + place * width + index, tl.where(best == LOWEST, NONE, whole))
        order = tl.where(at == best_at, LOWEST, order)


@Kernel
@triton.jit
def merge_chunks(
    bests, sums, ids, tokens, logs, chunks,
    WIDTH: tl.constexpr, REDUCED: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Tokens and logarithms of the softmax of each row's best keys, best first: int64 and float32
    ``[R, WIDTH]``.

    Each chunk has ``WIDTH`` keys; ``CHUNKS`` and ``SIZE`` are powers of two of which all chunks,
    and all their keys, are fewer. ``ids``: token of each logit, where ``REDUCED``.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk, at = tl.arange(0, CHUNKS), tl.arange(0, SIZE)
    bests += row * chunks * WIDTH
    first = tl.load(bests + chunk * WIDTH, mask=chunk < chunks, other=NONE)
    key = tl.load(bests + at, mask=at < chunks * WIDTH, other=NONE)
    top = tl.where(first == NONE, float("-inf"), _value(first))
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    part = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    # The sum is at least 1, but for a row of -inf.
    total = highest + tl.log(tl.maximum(tl.sum(part * tl.exp(top - highest), 0), 1.0))
    for index in range(WIDTH):
        best = tl.max(key, 0)
        key = tl.where(key == best, NONE, key)
        token, score = (best & LAST_ID) ^ LAST_ID, _value(best)
        if REDUCED:
            token = tl.load(ids + token)
        tl.store(tokens + row * WIDTH + index, token)
        tl.store(
            logs + row * WIDTH + index,
            tl.where(score == float("-inf"), float("-inf"), score - total),
        )


@Kernel
@triton.jit(do_not_specialize=["trees", "first", "parent_count", "width", "size", "nodes"])
def grow_level(
    ids, logs, above, confidences, last, tokens, parents, scores, paths, chosen, trees,
    first, parent_count, width, size, nodes,
    MIN_SCORE: tl.constexpr, CHAIN: tl.constexpr, CONFIDENT: tl.constexpr, PATHS: tl.constexpr,
    CANDIDATES: tl.constexpr, ROOM: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Add ``size`` nodes from number ``first`` on to each tree, the best by score; see
    :meth:`paceline.drafter.growth.levels.LevelTrees.add_level`.

    ``ids`` and ``logs`` ``[S P, width]`` are the candidates, ``above`` float64 ``[S, P]`` the
    scores of their ``parent_count`` P parents, ``confidences`` float64 ``[S, P]`` where
    ``CONFIDENT``, ``last`` int64 ``[S]``. Written are the tree's tables ``[S, nodes]``, ``scores``
    ``[2, S, nodes]``, ``paths`` uint8 ``[S, nodes, nodes]`` where ``PATHS``, and ``chosen``
    ``[S, size]``: scores of new nodes, -inf for those that are not expanded. ``CANDIDATES``,
    ``ROOM`` and ``BEFORE`` are powers of two, at least ``P width``, ``size`` and ``first``.
    """
    tree = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CANDIDATES)
    valid = at < parent_count * width
    begin = tree * parent_count * width
    log = tl.load(logs + begin + at, mask=valid, other=float("-inf")).to(tl.float64)
    # Divisions without a sign take fewer registers.
    parent = (at.to(tl.uint32) // width.to(tl.uint32)).to(tl.int32)
    if CONFIDENT:
        likeliest = tl.load(logs + begin + parent * width, mask=valid, other=0.0).to(tl.float64)
        at_best = tl.load(confidences + tree * parent_count + parent, mask=valid, other=0.0)
        change = at_best - likeliest
        if not CHAIN:
            change = tl.minimum(change, 0.0)
        log += tl.where(tl.abs(change) < float("inf"), change, 0.0)
    log = tl.minimum(log, 0.0)
    score = tl.load(above + tree * parent_count + parent, mask=valid, other=float("-inf")) + log
    free = valid
    new, old = tl.arange(0, ROOM), tl.arange(0, BEFORE)
    kept = tl.full([ROOM], float("-inf"), tl.float64)
    origin = tl.full([ROOM], 0, tl.int32)
    row = tree * nodes + first
    for index in range(size):
        best = tl.max(tl.where(free, score, float("-inf")), 0)
        place = tl.min(tl.where(free & (score == best), at, CANDIDATES), 0)
        free = free & (at != place)
        tl.store(tokens + row + index, tl.load(ids + begin + place))
        tl.store(scores + row + index, best)
        node_log = tl.sum(tl.where(at == place, log, 0.0), 0)
        tl.store(scores + trees.to(tl.int64) * nodes + row + index, node_log)
        kept = tl.where(new == index, best, kept)
        origin = tl.where(new == index, place, origin)
    # A node that fits the budget has at most ``last`` nodes with its score or a higher one.
    rank = tl.sum((kept[None, :] >= kept[:, None]).to(tl.int32) * (new < size)[None, :], 1)
    other = tl.load(scores + tree * nodes + old, mask=old < first, other=float("-inf"))
    higher = (other[None, :] >= kept[:, None]) & (old < first)[None, :]
    rank += tl.sum(higher.to(tl.int32), 1)
    expanded = (kept >= tl.full([ROOM], MIN_SCORE, tl.float64)) & (rank <= tl.load(last + tree))
    tl.store(chosen + tree * size + new, tl.where(expanded, kept, float("-inf")), mask=new < size)
    of = first - parent_count + (origin.to(tl.uint32) // width.to(tl.uint32)).to(tl.int32)
    tl.store(parents + row + new, of.to(tl.int64), mask=(new < size) & (first > 0))
    if PATHS:
        rows = (tree * nodes + of)[:, None] * nodes
        within = (new < size)[:, None] & (old < first)[None, :]
        path = tl.load(paths + rows + old[None, :], mask=within, other=0)
        goals = (tree * nodes + first + new)[:, None] * nodes
        tl.store(paths + goals + old[None, :], path, mask=within)


@Kernel
@triton.jit
def pack_paths(
    paths, starts, words, tree_stride, row_stride, start_stride,
    ALIGN: tl.constexpr, WORDS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Packs the path of each node, uint8 at ``paths``, to ``words`` int32 ``[S, N, WORDS]``: bit n
    is the slot n after the last multiple of ``ALIGN`` at or before the tree's start.

    ``ROOM`` is a power of two, at least ``WORDS``.
    """
    tree, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nodes = tl.num_programs(1)
    shift = tl.load(starts + tree * start_stride) % ALIGN
    word, bit = tl.arange(0, ROOM), tl.arange(0, 32)
    column = word[:, None] * 32 + bit[None, :] - shift
    inside = (column >= 0) & (column < nodes) & (word < WORDS)[:, None]
    row = paths + tree * tree_stride + node * row_stride
    value = tl.load(row + column, mask=inside, other=0).to(tl.int32)
    packed = tl.sum(value << bit[None, :], 1)
    tl.store(words + (tree * nodes + node) * WORDS + word, packed, mask=word < WORDS)
