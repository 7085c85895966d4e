/* The softmax of the scores of one chunk, some rows at a time: a row's largest score, its weights
 * and their sum wait for each other, those of other rows do not. */
#ifndef PACELINE_SOFTMAX_H
#define PACELINE_SOFTMAX_H

#include "vectors.h"

#define TOGETHER 8 /* rows at a time */

/* A row of scores: columns from .. to of `columns` are visible, the others become weights of 0. */
typedef struct {
  float *score;
  int64_t from, to, columns; /* columns: a multiple of 2 * WIDTH */
} Scores;

/* e^x for x up to 0, to 1e-5, for weights that are rounded to bfloat16: exactly 1 at 0, exactly 0
 * below -87 (minus infinity included). 2^f of the fraction is a polynomial of degree 4. */
INLINE vec exp_weight(vec x) {
  const vec magic = splat(12582912.0f), log2_e = splat(1.44269504f); /* as in exp_ */
  const vec shifted = fma_(x, log2_e, magic), f = fma_(x, log2_e, magic - shifted);
  const vec square = f * f, low = fma_(splat(0.69312418f), f, splat(1.0f));
  const vec middle = fma_(splat(0.055906426f), f, splat(0.24024099f));
  const vec high = fma_(splat(0.0095828529f), square, middle);
  return zero_below(x, splat(-87.0f), scale_(fma_(high, square, low), shifted));
}

INLINE void hide_columns(const Scores *s) {
  CHECK(s->from >= 0 && s->from <= s->to && s->to <= s->columns && s->columns <= CHUNK);
  for (int64_t c = 0; c < s->from; c++) s->score[c] = -INFINITY;
  for (int64_t c = s->to; c < s->columns; c++) s->score[c] = -INFINITY;
}

/* The largest visible score; -inf if none is visible. */
INLINE float peak_of(const Scores *s) {
  vec high = splat(-INFINITY);
  for (int64_t c = s->from / LANES * LANES; c < s->to; c += LANES)
    high = max_(high, load_f32(s->score + c));
  return max_lane(high);
}

/* Turns scores into weights relative to `peak`, in their place: as float32, or as bfloat16 if
 * `halves`. Sets WIDTH partial sums. */
INLINE void exponentiate(const Scores *s, float peak, const int halves, vec sum[WIDTH / LANES]) {
  const vec highest = splat(peak);
  for (int i = 0; i < WIDTH / LANES; i++) sum[i] = splat(0.0f);
  for (int64_t c = 0; c < s->columns; c += WIDTH)
    for (int i = 0; i < WIDTH / LANES; i++) {
      const int64_t at = c + i * LANES;
      const vec x = load_f32(s->score + at) - highest, weight = halves ? exp_weight(x) : exp_(x);
      if (halves)
        store_normal_bf16((uint16_t *)s->score + at, weight);
      else
        store_f32(s->score + at, weight);
      sum[i] = sum[i] + weight;
    }
}

/* Weights of `count` rows, at most TOGETHER, in the place of their scores; with the largest score
 * and the sum of the weights. A row without visible columns has the sum 0 and the peak -inf. */
INLINE void softmax(const Scores *rows, int64_t count, const int halves, float *peak, float *sum) {
  vec part[TOGETHER][WIDTH / LANES];
  for (int64_t i = 0; i < count; i++) hide_columns(rows + i);
  for (int64_t i = 0; i < count; i++) peak[i] = peak_of(rows + i);
  for (int64_t i = 0; i < count; i++)
    if (rows[i].from < rows[i].to)
      exponentiate(rows + i, peak[i], halves, part[i]);
    else
      memset(rows[i].score, 0, (size_t)rows[i].columns * sizeof(float));
  for (int64_t i = 0; i < count; i++)
    sum[i] = rows[i].from < rows[i].to ? add_vectors(part[i]) : 0.0f;
}

#endif
