/* Row-wise operations of a transformer, in float32: norms, rotary embedding, gated activation. */
#ifndef PACELINE_ROWS_H
#define PACELINE_ROWS_H

#include "cache_rows.h"

/* Sum of the squares of a row: WIDTH partial sums, then pairs of them. */
INLINE float sum_squares(const float *x, int64_t width) {
  float part[WIDTH];
  for (int l = 0; l < WIDTH; l += LANES) {
    vec sum = splat(0.0f);
    for (int64_t i = l; i < width; i += WIDTH) {
      vec a = load_f32(x + i);
      sum = fma_(a, a, sum);
    }
    store_f32(part + l, sum);
  }
  return add_up(part);
}

/* Mean square norm of one row times its weight; `weight` float32. */
INLINE void normalise(const float *x, const float *weight, int64_t width, float eps, float *out) {
  vec scale = splat(1.0f / sqrtf(sum_squares(x, width) / (float)width + eps));
  for (int64_t i = 0; i < width; i += LANES)
    store_f32(out + i, load_f32(x + i) * scale * load_f32(weight + i));
}

/* x [width] += delta * factor. */
INLINE void add_row(float *x, const float *delta, float factor, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES)
    store_f32(x + i, load_f32(x + i) + load_f32(delta + i) * splat(factor));
}

/* x [width] = cap * tanh(x / cap); any width. */
INLINE void cap_row(float *x, float cap, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES)
    store_part(x, i, width - i, 0, cap_(load_part(x + i, width - i), cap));
}

/* gates, ups [width] -> out [width] = silu(gate) * up, or with GELU in its form with tanh, which
 * is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). With a limit: gate * sigmoid(1.702 gate) * (up
 * + 1) of clamped gates and ups (gpt-oss). */
INLINE void gate_row(const float *gates, const float *ups, float *out, int gelu, float limit,
                     int64_t width) {
  const vec one = splat(1.0f), cube = splat(0.044715f), slope = splat(1.5957691216057308f);
  const vec high = splat(limit), sharp = splat(1.702f);
  for (int64_t i = 0; i < width; i += LANES) {
    vec gate = load_f32(gates + i), up = load_f32(ups + i), inner = gate;
    if (gelu) inner = slope * gate * fma_(cube, gate * gate, one);
    if (limit != 0.0f) {
      gate = min_(gate, high);
      up = min_(max_(up, -high), high) + one;
      inner = sharp * gate;
    }
    store_f32(out + i, gate / (one + exp_(-inner)) * up);
  }
}

/* x [width] *= sigmoid(gate). */
INLINE void sigmoid_gate_row(float *x, const float *gate, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES)
    store_f32(x + i, load_f32(x + i) / (splat(1.0f) + exp_(-load_f32(gate + i))));
}

/* x [width] *= sigmoid(gate) of one gate for all. */
INLINE void sigmoid_scale_row(float *x, float gate, int64_t width) {
  const vec scale = splat(1.0f) / (splat(1.0f) + exp_(-splat(gate)));
  for (int64_t i = 0; i < width; i += LANES) store_f32(x + i, load_f32(x + i) * scale);
}

/* The newest row x [width] of a causal convolution over itself and the rows before it in memory,
 * `before` of which are of its block (DFlash 2). base [size, width] and own [size, groups]: weights
 * of channels and of their groups, the newest row's first. */
INLINE void convolve_row(const float *x, const float *base, const float *own, int64_t size,
                         int64_t groups, int64_t before, float *out, int64_t width) {
  const int64_t group = width / groups;
  for (int64_t i = 0; i < width; i += LANES) {
    vec sum = splat(0.0f);
    for (int64_t back = 0; back < size && back <= before; back++) {
      float weights[LANES];
      for (int l = 0; l < LANES; l++) weights[l] = own[back * groups + (i + l) / group];
      sum +=
          (load_f32(base + back * width + i) + load_f32(weights)) * load_f32(x - back * width + i);
    }
    store_f32(out + i, sum);
  }
}

/* Heads of a model, and the norms of single queries and keys, or of all together if `whole`
 * (weights null: none); factors on rotated queries [dim], null: none. */
typedef struct {
  int64_t q_heads, kv_heads, dim;
  const float *q_weight, *k_weight, *v_weight, *q_factors; /* of norms; v: or null */
  int whole;
  float eps;
} Heads;

/* One head of `dim` values through its norm (weight null: none) into x, then rotated: the halves of
 * a head are the two coordinates. table: cosines [dim / 2], then sines [dim / 2]. */
INLINE void rotate(const float *from, const float *weight, float eps, const float *table,
                   int64_t dim, float *x, void *out, int64_t to, int out_bf16) {
  const int64_t half = dim / 2;
  memcpy(x, from, (size_t)dim * sizeof(float));
  if (weight) normalise(x, weight, dim, eps, x);
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = half - i;
    vec a = load_part(x + i, left), b = load_part(x + half + i, left);
    vec cos = load_part(table + i, left), sin = load_part(table + half + i, left);
    store_part(out, to + i, left, out_bf16, fma_(-b, sin, a * cos));
    store_part(out, to + half + i, left, out_bf16, fma_(a, sin, b * cos));
  }
}

/* heads [(Hq + 2 Hkv) D] -> rotated queries q [Hq, D]; the rotated keys and the values to `slot` of
 * the caches. Tables of queries and of keys: as for rotate(). Whole norms, and those of values, are
 * taken in place. */
INLINE void rotate_row(const Heads *p, float *heads, const float *q_table, const float *table,
                       float *q, const Cache *k, const Cache *v, int64_t slot, int kv_type) {
  const int64_t dim = p->dim, queries = p->q_heads * dim;
  const float *q_weight = p->whole ? NULL : p->q_weight, *k_weight = p->whole ? NULL : p->k_weight;
  float x[MAX_DIM];
  CHECK(dim <= MAX_DIM && slot >= 0);
  CHECK(!p->kv_heads || (slot < k->slots && slot < v->slots));
  if (p->whole) {
    normalise(heads, p->q_weight, queries, p->eps, heads);
    normalise(heads + queries, p->k_weight, p->kv_heads * dim, p->eps, heads + queries);
  }
  for (int64_t h = 0; h < p->q_heads; h++)
    rotate(heads + h * dim, q_weight, p->eps, q_table, dim, x, q, h * dim, 0);
  for (int64_t h = 0; p->q_factors && h < p->q_heads; h++)
    for (int64_t i = 0; i < dim; i += LANES)
      store_f32(q + h * dim + i, load_f32(q + h * dim + i) * load_f32(p->q_factors + i));
  for (int64_t h = 0; h < p->kv_heads; h++) {
    float *key = heads + (p->q_heads + h) * dim, *value = key + p->kv_heads * dim;
    if (p->v_weight) normalise(value, p->v_weight, dim, p->eps, value);
    const int64_t key_at = h * k->head_stride + slot * k->slot_stride;
    const int64_t value_at = h * v->head_stride + slot * v->slot_stride;
    if (kv_type == KV_INT8) {
      rotate(key, k_weight, p->eps, table, dim, x, x, 0, 0);
      store_i8(k, key_at, x, dim);
      store_i8(v, value_at, value, dim);
      continue;
    }
    rotate(key, k_weight, p->eps, table, dim, x, k->data, key_at, kv_type);
    for (int64_t i = 0; i < dim; i += LANES)
      store_any(v->data, value_at + i, kv_type, load_f32(value + i));
  }
}

#endif
