/* Row-wise operations one by one, for modules that are no program. */
#include "rows.h"

#define MANY 16384 /* values below which another thread costs more than it saves */

/* x [rows, width] float32 += delta (null: nothing); out = norm(x) * weight. */
void paceline_add_norm(float *x, const void *delta, const float *weight, float eps, void *out,
                       int64_t rows, int64_t width, int64_t delta_bf16, int64_t out_bf16) {
#pragma omp parallel for if (rows * width > MANY)
  for (int64_t r = 0; r < rows; r++) {
    float *row = x + r * width;
    if (delta) add_row(row, delta, r * width, (int)delta_bf16, width);
    normalise(row, weight, width, eps, out, r * width, (int)out_bf16);
  }
}

/* gate_up [rows, 2 * width] -> out [rows, width] = silu(gate) * up. */
void paceline_gate(const void *gate_up, void *out, int64_t rows, int64_t width, int64_t bf16) {
#pragma omp parallel for if (rows * width > MANY)
  for (int64_t r = 0; r < rows; r++) gate_row(gate_up, out, r, width, (int)bf16);
}

typedef struct {
  Heads heads;
  int64_t rows, heads_bf16, kv_type;
  const int64_t *sequence, *slot, *position; /* of every row */
} Rotation;

/* heads [M, Hq + 2 Hkv, D] -> rotated queries q [M, Hq, D] float32; rotated keys and the values
 * into the caches. `table` float32 [positions, D]: cosines, then sines. */
void paceline_rotate(const Rotation *p, const void *heads, const float *table, float *q,
                     const Cache *keys, const Cache *values) {
  const int64_t dim = p->heads.dim, all = p->heads.q_heads + 2 * p->heads.kv_heads;
#pragma omp parallel for if (p->rows * all * dim > MANY)
  for (int64_t r = 0; r < p->rows; r++)
    rotate_row(&p->heads, heads, (int)p->heads_bf16, r, table + p->position[r] * dim, q,
               keys + p->sequence[r], values + p->sequence[r], p->slot[r], (int)p->kv_type);
}
