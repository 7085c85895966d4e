/* The two products of attention by the dot product of pairs of bfloat16 (vdpbf16ps), for bfloat16
 * caches under numerics avx512_bf16.
 *
 * Queries and weights are rounded to bfloat16; sums are float32. A sum is one chain of dot products
 * of pairs: of dimensions, or of positions of a chunk, counted from its first. A pair that holds a
 * position of the tree is taken for each node with the values of its own path, so that drafted and
 * committed tokens are treated alike. Other levels have the instruction in plain C: dot_bf16. */
#ifndef PACELINE_ATTENTION_DOTS_H
#define PACELINE_ATTENTION_DOTS_H

#include "products.h"

/* Fetches the lines of `bytes` bytes into the cache of a level: 3 the first, 2 the second. */
INLINE void fetch_row(const char *row, int64_t bytes, const int level) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, level);
}

/* Words w .. w + LANES of LANES keys from `slot` on, as load_words has them. Fetches the keys
 * KEYS_AHEAD bytes further. */
INLINE void load_pairs(const Tile *t, int64_t slot, int64_t last, int64_t w, const int whole,
                       vec x[LANES]) {
  const int64_t next = t->k->slot_stride * 2;
  const char *ahead = row_at(t, t->k, KV_BF16, slot) + 4 * w + KEYS_AHEAD;
  load_words(t, KV_BF16, slot, last, w, t->plan->dim / 2, whole, x);
  if (w % 16) return; /* once a line */
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) __builtin_prefetch(ahead + i * next, 0, 2);
}

/* `columns` keys from `slot` on as a panel of pairs of dimensions, [dim / 2][columns]. The last key
 * before `stop` stands in for those behind it. */
static void pair_keys(const Tile *t, int64_t slot, int64_t stop, int64_t columns, float *panel) {
  const int64_t words = t->plan->dim / 2;
  const int whole = slot + columns <= stop && words % LANES == 0;
  for (const float *end = panel + columns; panel < end; panel += LANES, slot += LANES) {
    slot = min(slot, stop - 1);
    for (int64_t w = 0; w < words; w += LANES) {
      vec x[LANES];
      if (whole)
        load_pairs(t, slot, LANES, w, 1, x);
      else
        load_pairs(t, slot, stop - 1 - slot, w, 0, x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        if (whole || w + i < words) store_f32(panel + (w + i) * columns, x[i]);
    }
  }
}

/* Scores of FEW_KEYS keys from `slot` on, of few rows, for heads of whole vectors of pairs: the
 * keys stay in registers. */
INLINE void score_few_pairs(const int rows, const Tile *t, const float *q, int64_t slot, float *out,
                            int64_t stride) {
  const int64_t words = t->plan->dim / 2, q_stride = round_up(t->plan->dim, DOT) / 2;
  for (int g = 0; g < FEW_KEYS / LANES; g++, slot += LANES, out += LANES) {
    vec sum[FEW];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sum[r] = splat(0.0f);
    for (int64_t w = 0; w < words; w += LANES) {
      vec x[LANES];
      load_pairs(t, slot, LANES, w, 1, x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
          sum[r] = dot_pairs(sum[r], splat(q[r * q_stride + w + i]), x[i]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) store_f32(out + r * stride, sum[r]);
  }
}

/* Scores of slots first .. stop of all rows, to column slot - first of `out`. */
static void score_dots(const Tile *t, const Buffers *m, int64_t first, int64_t stop, float *out,
                       int64_t stride) {
  const int64_t pairs = t->plan->dim / 2;
  for (int64_t slot = first, columns; slot < stop; slot += columns, out += columns) {
    const int few = t->rows <= FEW && stop - slot >= FEW_KEYS && pairs % LANES == 0;
    columns = few ? FEW_KEYS : stop - slot > COLUMNS / 2 ? COLUMNS : LANES;
#define FEW_CASE(n) \
  case n: score_few_pairs(n, t, m->q, slot, out, stride); break;
    switch (few ? t->rows : 0) {
      CASES_4(FEW_CASE)
      default:
        pair_keys(t, slot, stop, columns, m->panel);
        multiply(columns, t->rows, m->q, round_up(t->plan->dim, DOT) / 2,
                 panel_of(m, columns, PAIRS), pairs, 0, out, stride);
    }
#undef FEW_CASE
  }
}

/* `vectors` vectors of values of two slots as pairs. */
INLINE void pair_values(const uint16_t *even, const uint16_t *odd, const int vectors, vec x[]) {
#if LANES == 16
#define PAIR(i) i, i + 32
#define PAIRS_FROM(i) PAIR(i), PAIR(i + 1), PAIR(i + 2), PAIR(i + 3)
  static const uint16_t order[2][32] = {
      {PAIRS_FROM(0), PAIRS_FROM(4), PAIRS_FROM(8), PAIRS_FROM(12)},
      {PAIRS_FROM(16), PAIRS_FROM(20), PAIRS_FROM(24), PAIRS_FROM(28)}};
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) {
    __m512i low, high;
    if (vectors == 1) {
      low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)even));
      high = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)odd));
    } else {
      low = _mm512_loadu_si512(even + i / 2 * 32), high = _mm512_loadu_si512(odd + i / 2 * 32);
    }
    x[i] =
        _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, _mm512_loadu_si512(order[i % 2]), high));
  }
#else
  uint32_t words[COLUMN_VECTORS * LANES];
  for (int i = 0; i < vectors * LANES; i++) words[i] = even[i] | (uint32_t)odd[i] << 16;
  memcpy(x, words, (size_t)vectors * sizeof *x);
#endif
}

/* Values whose pairs are weighted: `count` from slot `first` on, or of the slots in `slots`. */
typedef struct {
  int64_t first, count;
  const int64_t *slots;
} Values;

/* Weighted values of at most ROWS rows and `vectors` vectors of dimensions from `d` on; added to
 * `out` if `more`. Fetches the values KEYS_AHEAD bytes further if `fetch`. */
INLINE void weigh_register_tile(const int rows, const int vectors, const Tile *t, Values v,
                                int64_t d, const float *weights, int more, int fetch, float *out) {
  static const uint16_t zero[COLUMNS];
  const int64_t next = t->v->slot_stride;
  const uint16_t *base = (const uint16_t *)row_at(t, t->v, KV_BF16, v.first) + d;
  vec sum[ROWS][COLUMN_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
      sum[r][i] = more ? load_f32(out + r * t->width + i * LANES) : splat(0.0f);
#pragma GCC unroll 1
  for (int64_t k = 0; k < v.count; k += 2) {
    const uint16_t *even = base + (v.slots ? v.slots[k] : k) * next, *odd = zero;
    if (k + 1 < v.count) odd = v.slots ? base + v.slots[k + 1] * next : even + next;
    if (fetch) {
      fetch_row((const char *)even + KEYS_AHEAD, vectors * LANES * 2, 2);
      fetch_row((const char *)(even + next) + KEYS_AHEAD, vectors * LANES * 2, 2);
    }
    vec x[COLUMN_VECTORS];
    pair_values(even, odd, vectors, x);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const vec y = splat(weights[r * STRIDE + k / 2]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; i++) sum[r][i] = dot_pairs(sum[r][i], y, x[i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) store_f32(out + r * t->width + i * LANES, sum[r][i]);
}

INLINE void weigh_vectors(const int vectors, const Tile *t, Values v, int64_t d, int64_t rows,
                          const float *weights, int more, float *out) {
  for (int fetch = !v.slots; rows > 0; rows -= ROWS, fetch = 0) {
#define TILE_CASE(n) \
  case n: weigh_register_tile(n, vectors, t, v, d, weights, more, fetch, out); break;
    switch (min(rows, ROWS)) { CASES_6(TILE_CASE) }
#undef TILE_CASE
    weights += ROWS * STRIDE, out += ROWS * t->width;
  }
}

/* Weighted values of `rows` rows; their weights are bfloat16. */
static void weigh_pairs(const Tile *t, Values v, int64_t rows, const float *weights, int more,
                        float *out) {
  for (int64_t d = 0, columns; d < t->plan->dim; d += columns) {
    columns = d + COLUMNS <= t->plan->dim ? COLUMNS : LANES;
    if (columns == COLUMNS)
      weigh_vectors(COLUMN_VECTORS, t, v, d, rows, weights, more, out + d);
    else
      weigh_vectors(1, t, v, d, rows, weights, more, out + d);
  }
}

/* Weighted values of the chunk from `base` on: the prefix up to `stop`, then every row's path. */
static void weigh_dots(const Tile *t, const Buffers *m, int64_t base, int64_t stop, float *part) {
  const QueryBlock *b = t->block;
  const int64_t count = b->depths && stop < base + CHUNK ? (stop - base) / 2 * 2 : stop - base;
  CHECK(stop >= base && stop <= base + CHUNK);
  weigh_pairs(t, (Values){base, count, NULL}, t->rows, m->scores, 0, part);
  for (int64_t r = 0; b->depths && r < t->rows; r += t->group) {
    const int64_t n = t->node + r / t->group, to = min(CHUNK, position(t, n) + 1 - base);
    const int32_t *path = b->paths + b->path_starts[n];
    int64_t slots[CHUNK];
    for (int64_t i = count; i < to; i++)
      slots[i - count] = base + i < b->start ? base + i : b->start + path[base + i - b->start];
    if (count < to)
      weigh_pairs(t, (Values){0, to - count, slots}, t->group, m->scores + r * STRIDE + count / 2,
                  1, part + r * t->width);
  }
}

#endif
