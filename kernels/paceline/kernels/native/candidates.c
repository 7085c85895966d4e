/* The largest scores of rows, and their log-probabilities: what a drafter makes tree nodes of. */
#include <math.h>

#include "vectors.h"

#define PIECE 64 /* scores that are skipped together if none is among the best so far */

/* The largest of `count` scores. */
static float largest(const float *x, int64_t count) {
  float lanes[WIDTH], best = -INFINITY;
  vec high = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) high = max_(high, load_f32(x + i));
  store_f32(lanes, high);
  for (int l = 0; l < LANES; l++) best = lanes[l] > best ? lanes[l] : best;
  for (; i < count; i++) best = x[i] > best ? x[i] : best;
  return best;
}

/* Puts x[i] into its place among the best. */
static void insert(const float *x, int64_t i, int64_t width, int64_t *ids, float *best) {
  int64_t at = width - 1;
  for (; at > 0 && x[i] > best[at - 1]; at--) {
    best[at] = best[at - 1];
    ids[at] = ids[at - 1];
  }
  best[at] = x[i];
  ids[at] = i;
}

/* Sum of exp(x - peak). Not inlined: the constants of exp_ need all registers. */
static __attribute__((noinline)) float sum_exponentials(const float *x, int64_t count, float peak) {
  float part[WIDTH];
  const int64_t whole = count / WIDTH * WIDTH;
  for (int l = 0; l < WIDTH; l += LANES) {
    vec sum = splat(0.0f);
    for (int64_t i = l; i < whole; i += WIDTH) sum = sum + exp_(load_f32(x + i) - splat(peak));
    store_f32(part + l, sum);
  }
  float sum = add_up(part);
  for (int64_t i = whole; i < count; i++) sum += expf(x[i] - peak);
  return sum;
}

/* Of each row of scores [rows, count], `stride` apart: ids [rows, width] of the largest, best first,
 * the lower id first where they are equal, and the logs [rows, width] of their softmax. Where fewer
 * than `width` scores are above -inf, the others have arbitrary ids. */
void paceline_candidates(const float *scores, int64_t stride, int64_t rows, int64_t count,
                         int64_t width, int64_t *ids, float *logs) {
  for (int64_t r = 0; r < rows; r++, scores += stride, ids += width, logs += width) {
    for (int64_t w = 0; w < width; w++) {
      ids[w] = w;
      logs[w] = -INFINITY;
    }
    for (int64_t from = 0; from < count; from += PIECE) {
      const int64_t to = from + PIECE < count ? from + PIECE : count;
      if (!(largest(scores + from, to - from) > logs[width - 1])) continue;
      for (int64_t i = from; i < to; i++)
        if (scores[i] > logs[width - 1]) insert(scores, i, width, ids, logs);
    }
    const float peak = logs[0], total = peak + logf(sum_exponentials(scores, count, peak));
    for (int64_t w = 0; w < width; w++) logs[w] -= total;
  }
}
