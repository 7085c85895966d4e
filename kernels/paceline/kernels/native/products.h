/* The two products of attention, scores = queries * keys^T and results = weights * values, with one
 * kernel: C = A * B, A [rows, depth] by rows, B [depth, COLUMNS].
 *
 * B is a panel of COLUMNS keys or of COLUMNS dimensions of DEPTH values, converted to float32 once
 * for all rows. The panel stays in the first-level cache, a tile of C in registers. */
#ifndef PACELINE_PRODUCTS_H
#define PACELINE_PRODUCTS_H

#include "attention.h"

/* Elements of A and B: A of float32, B of float32 or bfloat16; or of both pairs of bfloat16. */
enum { FLOATS, HALVES, PAIRS };

typedef struct {
  const void *data; /* element (k, n) at k * stride + n */
  int64_t stride;
  int elements;
  const char *next; /* is fetched into the second-level cache on the way, at the same stride */
} Panel;

INLINE Panel panel_of(const Buffers *m, int64_t columns, int elements) {
  return (Panel){m->panel, columns, elements, NULL};
}

#define FEW 4                /* rows up to which keys are not converted to a panel */
#define FEW_KEYS (2 * LANES) /* keys for which they are not */

/* C = A * B, or C += A * B if `more`, for at most ROWS rows and `vectors` vectors of B's columns.
 * An element of C is one chain of FMAs over k. */
INLINE void multiply_tile(const int rows, const int vectors, const float *a, int64_t a_stride,
                          Panel b, const int elements, int64_t depth, int more, float *c,
                          int64_t c_stride) {
  const int bf16 = elements == HALVES;
  vec sum[ROWS][COLUMN_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
      sum[r][i] = more ? load_f32(c + r * c_stride + i * LANES) : splat(0.0f);
  int64_t at = 0;
#pragma GCC unroll 1
  for (int64_t k = 0; k < depth; k++, at += b.stride) {
    vec x[COLUMN_VECTORS];
    if (rows <= FEW && b.next)
      for (int64_t i = 0; i < vectors * LANES; i += bf16 ? 32 : 16)
        __builtin_prefetch(b.next + (at + i) * (bf16 ? 2 : 4), 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) x[i] = load_any(b.data, at + i * LANES, bf16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const vec y = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; i++)
        sum[r][i] = elements == PAIRS ? dot_pairs(sum[r][i], y, x[i]) : fma_(y, x[i], sum[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) store_f32(c + r * c_stride + i * LANES, sum[r][i]);
}

/* The same for any number of rows. */
INLINE void multiply_rows(const int vectors, const int elements, int64_t rows, const float *a,
                          int64_t a_stride, Panel b, int64_t depth, int more, float *c,
                          int64_t c_stride) {
  for (; rows > 0; rows -= ROWS, a += ROWS * a_stride, c += ROWS * c_stride) {
#define TILE_CASE(n) \
  case n: multiply_tile(n, vectors, a, a_stride, b, elements, depth, more, c, c_stride); break;
    switch (min(rows, ROWS)) { CASES_6(TILE_CASE) }
#undef TILE_CASE
  }
}

/* The same for `columns` columns, COLUMNS or LANES. */
static void multiply(int64_t columns, int64_t rows, const float *a, int64_t a_stride, Panel b,
                     int64_t depth, int more, float *c, int64_t c_stride) {
#define CALL(vectors, elements) \
  multiply_rows(vectors, elements, rows, a, a_stride, b, depth, more, c, c_stride)
  switch (b.elements) {
    case FLOATS: columns == COLUMNS ? CALL(COLUMN_VECTORS, FLOATS) : CALL(1, FLOATS); break;
    case HALVES: columns == COLUMNS ? CALL(COLUMN_VECTORS, HALVES) : CALL(1, HALVES); break;
    default: columns == COLUMNS ? CALL(COLUMN_VECTORS, PAIRS) : CALL(1, PAIRS);
  }
#undef CALL
}

/* 32-bit words w .. w + LANES of LANES keys from `slot` on: x[i] has word w + i of all keys. Key
 * `last` stands in for those behind it. `whole`: there are as many keys and words. */
INLINE void load_words(const Tile *t, const int type, int64_t slot, const int64_t last, int64_t w,
                       int64_t words, const int whole, vec x[LANES]) {
  const char *key = row_at(t, t->k, type, slot) + 4 * w;
  const int64_t next = t->k->slot_stride * kv_size(type);
#pragma GCC unroll 16
  for (int64_t i = 0; i < LANES; i++) {
    x[i] = whole ? load_f32((const float *)key) : load_part((const float *)key, words - w);
    key += whole || i < last ? next : 0;
  }
  transpose(x);
}

/* Runs BODY for each dimension of words w .. w + LANES of LANES keys from `slot` on, with the
 * dimension as `d` and its LANES numbers, one of each key, as `value`. It reads these names of the
 * function around it: the tile `t`, the cache's `type`, the first word `w` of `words`, and `x`,
 * which load_words has filled. Once a line it fetches keys that are KEYS_AHEAD bytes further, and
 * the values of these slots, into the second-level cache. It is a macro because BODY changes the
 * registers of its function. */
#define EACH_DIMENSION(slot, BODY)                                        \
  const char *key = row_at(t, t->k, type, slot) + 4 * w + KEYS_AHEAD;     \
  const char *of_value = row_at(t, t->v, type, slot) + 4 * w;             \
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {              \
    if (w % 16 == 0) { /* once a line */                                  \
      __builtin_prefetch(key, 0, 2);                                      \
      __builtin_prefetch(of_value, 0, 2);                                 \
      key += t->k->slot_stride * kv_size(type);                           \
      of_value += t->v->slot_stride * kv_size(type);                      \
    }                                                                     \
    if (w + i >= words) continue;                                         \
    _Pragma("GCC unroll 4") for (int j = 0; j < 4 / kv_size(type); j++) { \
      const int64_t d = (w + i) * (4 / kv_size(type)) + j;                \
      const vec value = value_of(x[i], type, j);                          \
      BODY;                                                               \
    }                                                                     \
  }

/* `columns` keys from `slot` on as a panel [dim][columns]. The last key before `stop` stands in for
 * those behind it. */
INLINE void transpose_keys(const Tile *t, const int type, int64_t slot, int64_t stop,
                           int64_t columns, float *panel) {
  const int64_t words = t->plan->dim * kv_size(type) / 4;
  for (const float *end = panel + columns; panel < end; panel += LANES, slot += LANES) {
    slot = min(slot, stop - 1);
    for (int64_t w = 0; w < words; w += LANES) {
      vec x[LANES];
      load_words(t, type, slot, stop - 1 - slot, w, words, 0, x);
      EACH_DIMENSION(slot, store_f32(panel + d * columns, value))
    }
  }
}

/* Scores of FEW_KEYS keys from `slot` on, of few rows: the keys stay in registers. While the sums
 * of one vector of keys wait for their FMAs, the other vector is loaded. */
INLINE void score_few(const int rows, const Tile *t, const int type, const float *q, int64_t slot,
                      float *out, int64_t stride) {
  const int64_t words = t->plan->dim * kv_size(type) / 4;
  vec sum[FEW_KEYS / LANES][FEW];
#pragma GCC unroll 2
  for (int g = 0; g < FEW_KEYS / LANES; g++)
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sum[g][r] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t w = 0; w < words; w += LANES)
#pragma GCC unroll 2
    for (int g = 0; g < FEW_KEYS / LANES; g++) {
      vec x[LANES];
      load_words(t, type, slot + g * LANES, LANES - 1, w, words, 0, x);
      EACH_DIMENSION(slot + g * LANES,
                     _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) sum[g][r] =
                         fma_(splat(q[r * t->plan->dim + d]), value, sum[g][r]))
    }
#pragma GCC unroll 2
  for (int g = 0; g < FEW_KEYS / LANES; g++)
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) store_f32(out + r * stride + g * LANES, sum[g][r]);
}

/* Multiplies columns of all rows with the scales of slots first .. stop of one of the caches; the
 * columns up to the next whole vector stay as they are. At most COLUMNS or DEPTH slots. */
static void scale_columns(const Tile *t, const Cache *c, int64_t first, int64_t stop, float *out,
                          int64_t stride) {
  const int64_t count = stop - first, at = t->head * c->head_stride;
  float scales[COLUMNS > DEPTH ? COLUMNS : DEPTH];
  CHECK(round_up(count, LANES) * (int64_t)sizeof(float) <= (int64_t)sizeof scales);
  for (int64_t i = 0; i < round_up(count, LANES); i++)
    scales[i] = i < count ? scale_of(c, at + (first + i) * c->slot_stride, t->plan->dim) : 1.0f;
  for (int64_t r = 0; r < t->rows; r++)
    for (int64_t i = 0; i < count; i += LANES)
      store_f32(out + r * stride + i, load_f32(out + r * stride + i) * load_f32(scales + i));
}

/* Scores of slots first .. stop of all rows, to column slot - first of `out`. */
INLINE void score_keys(const Tile *t, const int type, const Buffers *m, int64_t first, int64_t stop,
                       float *out, int64_t stride) {
  const int64_t dim = t->plan->dim;
  for (int64_t slot = first, columns; slot < stop; slot += columns, out += columns) {
    const int few = t->rows <= FEW && stop - slot >= FEW_KEYS;
    columns = few ? FEW_KEYS : stop - slot > COLUMNS / 2 ? COLUMNS : LANES;
#define FEW_CASE(n) \
  case n: score_few(n, t, type, m->q, slot, out, stride); break;
    switch (few ? t->rows : 0) {
      CASES_4(FEW_CASE)
      default:
        transpose_keys(t, type, slot, stop, columns, m->panel);
        multiply(columns, t->rows, m->q, dim, panel_of(m, columns, FLOATS), dim, 0, out, stride);
    }
#undef FEW_CASE
    if (type == KV_INT8) scale_columns(t, t->k, slot, min(slot + columns, stop), out, stride);
  }
}

static void score(const Tile *t, const Buffers *m, int64_t first, int64_t stop, float *out,
                  int64_t stride) {
  switch (t->plan->kv_type) {
    case KV_F32: score_keys(t, KV_F32, m, first, stop, out, stride); break;
    case KV_BF16: score_keys(t, KV_BF16, m, first, stop, out, stride); break;
    default: score_keys(t, KV_INT8, m, first, stop, out, stride);
  }
}

/* Weighted values of slots first .. stop, for all rows of one chunk. With few rows, fetches the
 * keys of the next chunk: memory is busy in both products. */
static void weigh_values(const Tile *t, const Buffers *m, int64_t first, int64_t stop,
                         float *part) {
  const int64_t dim = t->plan->dim, stride = t->v->slot_stride;
  const int type = (int)t->plan->kv_type;
  CHECK(stop >= first && stop <= first + CHUNK);
  const int convert = type == KV_INT8 || (type == KV_BF16 && t->rows > ROWS);
  for (int64_t slot = first; slot == first || slot < stop; slot += DEPTH) {
    const int64_t depth = min(DEPTH, stop - slot); /* 0: results are 0 */
    float *weights = m->scores + slot - first;
    if (type == KV_INT8) scale_columns(t, t->v, slot, slot + depth, weights, STRIDE);
    for (int64_t d = 0, columns; d < dim; d += columns) {
      columns = d + COLUMNS <= dim ? COLUMNS : LANES;
      const int64_t at = t->head * t->v->head_stride + slot * stride + d;
      Panel panel = {(const char *)t->v->data + at * kv_size(type), stride, type == KV_BF16,
                     row_at(t, t->k, type, slot + CHUNK) + d * kv_size(type)};
      if (convert) {
        for (int64_t k = 0; k < depth; k++)
          for (int64_t i = 0; i < columns; i += LANES)
            store_f32(m->panel + k * columns + i, load_kv(panel.data, k * stride + i, type));
        panel = panel_of(m, columns, FLOATS);
      }
      multiply(columns, t->rows, weights, STRIDE, panel, depth, slot > first, part + d, t->width);
    }
  }
}

#endif
