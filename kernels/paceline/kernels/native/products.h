/* The two products of attention: scores of keys, and weighted values. Inner loops keep their sums in
 * registers. */
#ifndef PACELINE_PRODUCTS_H
#define PACELINE_PRODUCTS_H

#include "attention.h"

/* Calls CALL(n) with the constant n that `count` is, 1 .. ROWS. */
#define WITH_ROWS(count, CALL) \
  switch (count) {             \
    case 1: CALL(1); break;    \
    case 2: CALL(2); break;    \
    case 3: CALL(3); break;    \
    case 4: CALL(4); break;    \
    case 5: CALL(5); break;    \
    default: CALL(6);          \
  }

/* KEYS keys from `slot` on as [dim][KEYS] floats; those from `stop` on are 0. */
static void transpose_keys(const Tile *t, int64_t slot, int64_t stop, float *out) {
  const int64_t dim = t->plan->dim, base = t->head * t->k->head_stride;
  const int bf16 = (int)t->plan->kv_bf16;
  const vec zero = splat(0.0f);
  for (int64_t part = 0; part < KEYS; part += LANES) {
    int64_t d = 0;
    vec x[LANES];
    for (; bf16 && d + 2 * LANES <= dim; d += 2 * LANES) { /* pairs of values move as one */
      const uint16_t *from = (const uint16_t *)t->k->data + base + d;
      for (int64_t i = 0; i < LANES; i++) {
        const int64_t at = slot + part + i;
        x[i] = at < stop ? load_f32((const float *)(from + at * t->k->slot_stride)) : zero;
      }
      transpose(x);
      for (int64_t i = 0; i < LANES; i++) {
        vec even, odd;
        split_bf16(x[i], &even, &odd);
        store_f32(out + (d + 2 * i) * KEYS + part, even);
        store_f32(out + (d + 2 * i + 1) * KEYS + part, odd);
      }
    }
    for (; d < dim; d += LANES) {
      for (int64_t i = 0; i < LANES; i++) {
        const int64_t at = slot + part + i;
        x[i] = at < stop ? load_any(t->k->data, base + at * t->k->slot_stride + d, bf16) : zero;
      }
      transpose(x);
      for (int64_t i = 0; i < LANES; i++) store_f32(out + (d + i) * KEYS + part, x[i]);
    }
  }
}

/* Scores of `rows` rows (q [dim][ROWS]) and KEYS keys, to out at `stride`. */
INLINE void multiply_keys(const int rows, const float *q, const float *keys, int64_t dim,
                          float *out, int64_t stride) {
  vec sum[ROWS][BLOCK];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK; i++) sum[r][i] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t d = 0; d < dim; d++) {
    vec key[BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK; i++) key[i] = load_f32(keys + d * KEYS + i * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const vec x = splat(q[d * ROWS + r]);
#pragma GCC unroll 4
      for (int i = 0; i < BLOCK; i++) sum[r][i] = fma_(x, key[i], sum[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK; i++) store_f32(out + r * stride + i * LANES, sum[r][i]);
}

/* Scores of slots first .. stop of all rows, to column slot - first of `out`. */
static void score(const Tile *t, const Buffers *m, int64_t first, int64_t stop, float *out,
                  int64_t stride) {
  const int64_t dim = t->plan->dim;
  for (int64_t slot = first; slot < stop; slot += KEYS) {
    transpose_keys(t, slot, stop, m->keys);
    for (int64_t r = 0; r < t->rows; r += ROWS) {
      float *to = out + r * stride + (slot - first);
#define CALL(n) multiply_keys(n, m->q + r * dim, m->keys, dim, to, stride)
      WITH_ROWS(t->rows - r, CALL)
#undef CALL
    }
  }
}

/* out = weights times values, for `rows` rows at `stride`, `count` slots and `vectors` vectors of
 * the values from element `at` on. */
INLINE void multiply_values(const int rows, const int vectors, const float *weights,
                            const Cache *v, int64_t at, int64_t count, int bf16, float *out,
                            int64_t width) {
  vec sum[ROWS][BLOCK];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) sum[r][i] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t s = 0; s < count; s++, at += v->slot_stride) {
    vec x[BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) x[i] = load_any(v->data, at + i * LANES, bf16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const vec w = splat(weights[r * STRIDE + s]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; i++) sum[r][i] = fma_(w, x[i], sum[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) store_f32(out + r * width + i * LANES, sum[r][i]);
}

/* Weighted values of slots first .. stop, for all rows of one chunk. */
INLINE void weigh_values(const Tile *t, const Buffers *m, int64_t first, int64_t stop, int bf16,
                         float *part) {
  const int64_t dim = t->plan->dim, wide = BLOCK * LANES;
  const int64_t at = t->head * t->v->head_stride + first * t->v->slot_stride;
  for (int64_t r = 0; r < t->rows; r += ROWS) {
    const float *weights = m->scores + r * STRIDE;
    float *out = part + r * t->width;
    int64_t d = 0;
    for (; d + wide <= dim; d += wide) {
#define CALL(n) \
  multiply_values(n, BLOCK, weights, t->v, at + d, stop - first, bf16, out + d, t->width)
      WITH_ROWS(t->rows - r, CALL)
#undef CALL
    }
    for (; d < dim; d += LANES) {
#define CALL(n) multiply_values(n, 1, weights, t->v, at + d, stop - first, bf16, out + d, t->width)
      WITH_ROWS(t->rows - r, CALL)
#undef CALL
    }
  }
}

#endif
