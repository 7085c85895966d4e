/* Row-wise operations of a transformer: norms, rotary embedding, gated activation. All arithmetic is
 * float32, for all types in memory. */
#include "vectors.h"

#define MAX_DIM 512
#define MANY 16384 /* values below which another thread costs more than it saves */

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
INLINE void normalise(const float *x, const float *weight, int64_t width, float eps, void *out,
                      int64_t at, int bf16) {
  vec scale = splat(1.0f / sqrtf(sum_squares(x, width) / (float)width + eps));
  for (int64_t i = 0; i < width; i += LANES)
    store_any(out, at + i, bf16, load_f32(x + i) * scale * load_f32(weight + i));
}

/* x [rows, width] float32 += delta (null: nothing); out = norm(x) * weight. */
void paceline_add_norm(float *x, const void *delta, const float *weight, float eps, void *out,
                       int64_t rows, int64_t width, int64_t delta_bf16, int64_t out_bf16) {
#pragma omp parallel for if (rows * width > MANY)
  for (int64_t r = 0; r < rows; r++) {
    float *row = x + r * width;
    if (delta)
      for (int64_t i = 0; i < width; i += LANES)
        store_f32(row + i, load_f32(row + i) + load_any(delta, r * width + i, (int)delta_bf16));
    normalise(row, weight, width, eps, out, r * width, (int)out_bf16);
  }
}

/* gate_up [rows, 2 * width] -> out [rows, width] = silu(gate) * up. */
void paceline_gate(const void *gate_up, void *out, int64_t rows, int64_t width, int64_t bf16) {
#pragma omp parallel for if (rows * width > MANY)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i += LANES) {
      vec gate = load_any(gate_up, r * 2 * width + i, (int)bf16);
      vec up = load_any(gate_up, r * 2 * width + width + i, (int)bf16);
      vec one = splat(1.0f);
      store_any(out, r * width + i, (int)bf16, gate / (one + exp_(-gate)) * up);
    }
}

typedef struct {
  int64_t rows, q_heads, kv_heads, dim;
  int64_t heads_bf16, kv_bf16;
  const int64_t *sequence, *slot, *position; /* of every row */
  float eps;                                 /* of the norms of queries and keys */
} Rotation;

/* One head of `dim` values through its norm (weight null: none) into x, then rotated: the halves of
 * a head are the two coordinates. table: cosines [dim / 2], then sines [dim / 2]. */
INLINE void rotate(const void *from, int64_t at, int bf16, const float *weight, float eps,
                   const float *table, int64_t dim, float *x, void *out, int64_t to,
                   int out_bf16) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < dim; i += LANES) store_f32(x + i, load_any(from, at + i, bf16));
  if (weight) normalise(x, weight, dim, eps, x, 0, 0);
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = half - i;
    vec a = load_part(x, i, left, 0), b = load_part(x, half + i, left, 0);
    vec cos = load_part(table, i, left, 0), sin = load_part(table, half + i, left, 0);
    store_part(out, to + i, left, out_bf16, fma_(-b, sin, a * cos));
    store_part(out, to + half + i, left, out_bf16, fma_(a, sin, b * cos));
  }
}

/* heads [M, Hq + 2 Hkv, D] -> rotated queries q [M, Hq, D] float32; rotated keys and the values
 * into the caches. `table` float32 [positions, D]: cosines, then sines. */
void paceline_rotate(const Rotation *p, const void *heads, const float *q_weight,
                     const float *k_weight, const float *table, float *q, const Cache *keys,
                     const Cache *values) {
  const int64_t all = p->q_heads + 2 * p->kv_heads, dim = p->dim;
#pragma omp parallel for if (p->rows * all * dim > MANY)
  for (int64_t r = 0; r < p->rows; r++) {
    const float *at = table + p->position[r] * dim;
    const Cache *k = keys + p->sequence[r], *v = values + p->sequence[r];
    float x[MAX_DIM];
    for (int64_t h = 0; h < p->q_heads; h++)
      rotate(heads, (r * all + h) * dim, (int)p->heads_bf16, q_weight, p->eps, at, dim, x, q,
             (r * p->q_heads + h) * dim, 0);
    for (int64_t h = 0; h < p->kv_heads; h++) {
      const int64_t key = (r * all + p->q_heads + h) * dim, value = key + p->kv_heads * dim;
      rotate(heads, key, (int)p->heads_bf16, k_weight, p->eps, at, dim, x, k->data,
             h * k->head_stride + p->slot[r] * k->slot_stride, (int)p->kv_bf16);
      const int64_t to = h * v->head_stride + p->slot[r] * v->slot_stride;
      for (int64_t i = 0; i < dim; i += LANES)
        store_any(v->data, to + i, (int)p->kv_bf16,
                  load_any(heads, value + i, (int)p->heads_bf16));
    }
  }
}
