/* Linear layers with float32 or bfloat16 weights: an output is one chain of FMAs. */
#ifndef PACELINE_LINEAR_FLOAT_H
#define PACELINE_LINEAR_FLOAT_H

#include "linear_units.h"

#if LANES == 16
#define FLOAT_ROWS 12 /* with two vectors of outputs they fill 32 registers */
#else
#define FLOAT_ROWS 4
#endif

/* Weights of input k + odd for one vector of outputs, k even; a line of bfloat16 has both inputs.
 */
INLINE vec float_weight(const int bf16, const char *weights, int64_t k, const int odd) {
  if (!bf16) return load_f32((const float *)(weights + (k + odd) * 64));
  vec pair[2];
  split_bf16(load_f32((const float *)(weights + k * 32)), &pair[0], &pair[1]);
  return pair[odd];
}

#define STREAMS (UNIT / PANEL) /* panels of a unit, which are read side by side */

/* UNIT outputs, from `first` on, of `rows` rows. Weights are fetched in steps of two inputs. A
 * range that is alone runs ahead of itself, from the ends of panels on in those of the next unit.
 * One of several runs through its share of the next unit: it fetches lines more than once, which
 * costs nothing. */
INLINE void float_unit(const int rows, const int bf16, const Matrix *m, const float *x, float *out,
                       int64_t first, Turn turn) {
  const int64_t ins = m->ins, panel = padded_ins(m) * PANEL * (bf16 ? 2 : 4);
  const int64_t step = bf16 ? 64 : 128, spacing = step / turn.count;
  const int alone = turn.count == 1;
  const char *weights[VECTORS];
  vec sum[FLOAT_ROWS][VECTORS], w[VECTORS];
  float sums[FLOAT_ROWS * UNIT];
  int64_t k = 0;
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) weights[v] = place(m->values, panel, first + v * LANES);
  const char *fetch = weights[0], *end = fetch + panel;
  fetch += alone ? WEIGHTS_AHEAD / STREAMS : STREAMS * panel + panel / turn.count * turn.number;
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sum[r][v] = splat(0.0f);
#pragma GCC unroll 1
  for (; k + 2 <= ins; k += 2, fetch += spacing) {
    if (alone && fetch == end) fetch += (STREAMS - 1) * panel;
#pragma GCC unroll 2
    for (int s = 0; s < STREAMS; s++)
#pragma GCC unroll 2
      for (int64_t p = 0; p < step; p += 64)
        if (alone)
          __builtin_prefetch(fetch + s * panel + p, 0, 3);
        else
          __builtin_prefetch(fetch + s * panel + p, 0, 2);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) w[v] = float_weight(bf16, weights[v], k, odd);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
          sum[r][v] = fma_(splat(x[r * ins + k + odd]), w[v], sum[r][v]);
    }
  }
  if (k < ins) { /* the last of an odd number */
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) w[v] = float_weight(bf16, weights[v], k, 0);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[r][v] = fma_(splat(x[r * ins + k]), w[v], sum[r][v]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store_f32(sums + r * UNIT + v * LANES, sum[r][v]);
  finish(m, rows, sums, UNIT, out, first);
}

#define FLOAT_CASE(n) \
  case n: float_unit(n, bf16, m, x, out, first, turn); break;

INLINE void float_rows(int64_t rows, const int bf16, const Matrix *m, const float *x, float *out,
                       int64_t first, Turn turn) {
  switch (rows) { CASES_TO(FLOAT_ROWS, FLOAT_CASE) }
}

static void f32_rows(int64_t rows, const Matrix *m, const float *x, float *out, int64_t first,
                     Turn turn) {
  float_rows(rows, 0, m, x, out, first, turn);
}

static void bf16_rows(int64_t rows, const Matrix *m, const float *x, float *out, int64_t first,
                      Turn turn) {
  float_rows(rows, 1, m, x, out, first, turn);
}
#endif
