/* The two products of attention, scores = queries * keys^T and results = weights * values, with one
 * kernel: C = A * B, A [rows, depth] by rows, B [depth, COLUMNS].
 *
 * B is a panel of COLUMNS keys or of COLUMNS dimensions of DEPTH values, converted to float32 once
 * for all rows. The panel stays in the first-level cache, a block of C in registers. */
#ifndef PACELINE_PRODUCTS_H
#define PACELINE_PRODUCTS_H

#include "attention.h"

typedef struct {
  const void *data; /* element (k, n) at k * stride + n */
  int64_t stride;
  int bf16;
} Panel;

/* C = A * B, or C += A * B if `more`, for at most ROWS rows and `vectors` vectors of B's columns.
 * An element of C is one chain of FMAs over k. */
INLINE void multiply_block(const int rows, const int vectors, const float *a, int64_t a_stride,
                           Panel b, const int bf16, int64_t depth, int more, float *c,
                           int64_t c_stride) {
  vec sum[ROWS][BLOCK];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
      sum[r][i] = more ? load_f32(c + r * c_stride + i * LANES) : splat(0.0f);
  int64_t at = 0;
#pragma GCC unroll 1
  for (int64_t k = 0; k < depth; k++, at += b.stride) {
    vec x[BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) x[i] = load_any(b.data, at + i * LANES, bf16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const vec y = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; i++) sum[r][i] = fma_(y, x[i], sum[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) store_f32(c + r * c_stride + i * LANES, sum[r][i]);
}

/* The same for any number of rows. */
INLINE void multiply_rows(const int vectors, const int bf16, int64_t rows, const float *a,
                          int64_t a_stride, Panel b, int64_t depth, int more, float *c,
                          int64_t c_stride) {
  for (; rows > 0; rows -= ROWS, a += ROWS * a_stride, c += ROWS * c_stride) {
#define CALL(n) multiply_block(n, vectors, a, a_stride, b, bf16, depth, more, c, c_stride)
    switch (rows) {
      case 1: CALL(1); break;
      case 2: CALL(2); break;
      case 3: CALL(3); break;
      case 4: CALL(4); break;
      case 5: CALL(5); break;
      default: CALL(6);
    }
#undef CALL
  }
}

/* The same for `columns` columns, COLUMNS or LANES. */
static void multiply(int64_t columns, int64_t rows, const float *a, int64_t a_stride, Panel b,
                     int64_t depth, int more, float *c, int64_t c_stride) {
  if (columns == COLUMNS && b.bf16)
    multiply_rows(BLOCK, 1, rows, a, a_stride, b, depth, more, c, c_stride);
  else if (columns == COLUMNS)
    multiply_rows(BLOCK, 0, rows, a, a_stride, b, depth, more, c, c_stride);
  else if (b.bf16)
    multiply_rows(1, 1, rows, a, a_stride, b, depth, more, c, c_stride);
  else
    multiply_rows(1, 0, rows, a, a_stride, b, depth, more, c, c_stride);
}

/* `columns` keys from `slot` on as a panel [dim][columns]. The last key before `stop` stands in for
 * those behind it. */
static void transpose_keys(const Tile *t, int64_t slot, int64_t stop, int64_t columns,
                           float *panel) {
  const int64_t dim = t->plan->dim, stride = t->k->slot_stride;
  const int type = (int)t->plan->kv_type;
  for (int64_t part = 0; part < columns; part += LANES) {
    float *out = panel + part;
    int64_t at[LANES], d = 0;
    vec x[LANES];
    for (int64_t i = 0; i < LANES; i++)
      at[i] = t->head * t->k->head_stride + least(slot + part + i, stop - 1) * stride;
    for (; type == KV_BF16 && d + 2 * LANES <= dim; d += 2 * LANES) { /* pairs move as one */
      const uint16_t *from = (const uint16_t *)t->k->data + d;
      for (int64_t i = 0; i < LANES; i++) {
        x[i] = load_f32((const float *)(from + at[i]));
        __builtin_prefetch(from + at[i] + AHEAD * stride, 0, 2); /* to the second-level cache */
      }
      transpose(x);
      for (int64_t i = 0; i < LANES; i++) {
        vec even, odd;
        split_bf16(x[i], &even, &odd);
        store_f32(out + (d + 2 * i) * columns, even);
        store_f32(out + (d + 2 * i + 1) * columns, odd);
      }
    }
    for (; type == KV_INT8 && d + 4 * LANES <= dim; d += 4 * LANES) { /* 4 bytes too */
      const int8_t *from = (const int8_t *)t->k->data + d;
      for (int64_t i = 0; i < LANES; i++) {
        x[i] = load_f32((const float *)(from + at[i]));
        __builtin_prefetch(from + at[i] + AHEAD * stride, 0, 2);
      }
      transpose(x);
      for (int64_t i = 0; i < LANES; i++)
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; byte++)
          store_f32(out + (d + 4 * i + byte) * columns, byte_of(x[i], byte));
    }
    for (; d < dim; d += LANES) {
      for (int64_t i = 0; i < LANES; i++) x[i] = load_kv(t->k->data, at[i] + d, type);
      transpose(x);
      for (int64_t i = 0; i < LANES; i++) store_f32(out + (d + i) * columns, x[i]);
    }
  }
}

/* Multiplies columns of all rows with the scales of slots first .. stop of one of the caches; the
 * columns up to the next whole vector stay as they are. At most COLUMNS or DEPTH slots. */
static void scale_columns(const Tile *t, const Cache *c, int64_t first, int64_t stop, float *out,
                          int64_t stride) {
  const int64_t count = stop - first, at = t->head * c->head_stride;
  float scales[COLUMNS > DEPTH ? COLUMNS : DEPTH];
  for (int64_t i = 0; i < round_up(count, LANES); i++)
    scales[i] = i < count ? scale_of(c, at + (first + i) * c->slot_stride, t->plan->dim) : 1.0f;
  for (int64_t r = 0; r < t->rows; r++)
    for (int64_t i = 0; i < count; i += LANES)
      store_f32(out + r * stride + i, load_f32(out + r * stride + i) * load_f32(scales + i));
}

/* Scores of slots first .. stop of all rows, to column slot - first of `out`. */
static void score(const Tile *t, const Buffers *m, int64_t first, int64_t stop, float *out,
                  int64_t stride) {
  const int64_t dim = t->plan->dim;
  for (int64_t slot = first, columns; slot < stop; slot += columns) {
    columns = stop - slot > COLUMNS / 2 ? COLUMNS : LANES;
    const Panel panel = {m->panel, columns, 0};
    transpose_keys(t, slot, stop, columns, m->panel);
    multiply(columns, t->rows, m->q, dim, panel, dim, 0, out + (slot - first), stride);
    if (t->plan->kv_type == KV_INT8)
      scale_columns(t, t->k, slot, least(slot + columns, stop), out + (slot - first), stride);
  }
}

/* Weighted values of slots first .. stop, for all rows of one chunk. */
static void weigh_values(const Tile *t, const Buffers *m, int64_t first, int64_t stop,
                         float *part) {
  const int64_t dim = t->plan->dim, stride = t->v->slot_stride;
  const int type = (int)t->plan->kv_type;
  const int convert = type == KV_INT8 || (type == KV_BF16 && t->rows > ROWS);
  for (int64_t slot = first; slot == first || slot < stop; slot += DEPTH) {
    const int64_t depth = least(DEPTH, stop - slot); /* 0: results are 0 */
    float *weights = m->scores + slot - first;
    if (type == KV_INT8) scale_columns(t, t->v, slot, slot + depth, weights, STRIDE);
    for (int64_t d = 0, columns; d < dim; d += columns) {
      columns = d + COLUMNS <= dim ? COLUMNS : LANES;
      const int64_t at = t->head * t->v->head_stride + slot * stride + d;
      Panel panel = {(const char *)t->v->data + at * kv_size(type), stride, type == KV_BF16};
      if (convert) {
        for (int64_t k = 0; k < depth; k++)
          for (int64_t i = 0; i < columns; i += LANES)
            store_f32(m->panel + k * columns + i,
                      load_kv(panel.data, k * stride + i, type));
        panel = (Panel){m->panel, columns, 0};
      }
      multiply(columns, t->rows, weights, STRIDE, panel, depth, slot > first, part + d, t->width);
    }
  }
}

#endif
