/* Noise, probabilities and candidates of tokens. Noise and probabilities have the same bits on
 * every machine with FMA. */
#include "sampling.h"

#include <math.h>

#include "check.h"
#include "vectors.h"

#define ROUNDS 10
#define LOW 0xFFFFFFFFu
#define CHUNK_IDS 512
#define PIECE 64 /* scores that are skipped together if none is among the best so far */

/* The 52-bit integers behind the noise of `count` ids at one position: Philox4x32-10;
 * kernels/noise.py defines the words of each id. Words are kept in 64-bit variables, so that the
 * compiler works on a vector of ids at once. */
static void draw(uint64_t seed, uint64_t position, const int64_t *ids, int64_t count,
                 uint64_t *out) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t a = position & LOW, b = position >> 32, c = (uint64_t)ids[i] >> 1, d = 0;
    uint64_t key = seed & LOW, other = seed >> 32;
#pragma GCC unroll 10
    for (int round = 0; round < ROUNDS; round++) {
      const uint64_t first = a * 0xD2511F53u, second = c * 0xCD9E8D57u;
      a = (second >> 32) ^ b ^ key;
      b = second & LOW;
      c = (first >> 32) ^ d ^ other;
      d = first & LOW;
      key = (key + 0x9E3779B9u) & LOW;
      other = (other + 0xBB67AE85u) & LOW;
    }
    const uint64_t even = a << 20 | b >> 12, odd = c << 20 | d >> 12;
    out[i] = ids[i] & 1 ? odd : even;
  }
}

/* Gumbel noise -ln(-ln u), u = (mantissa + 0.5) 2^-52, rounded to float32. */
void paceline_gumbel(uint64_t seed, uint64_t position, const int64_t *ids, int64_t count,
                     float *out) {
  CHECK(count >= 0 && (!count || (ids && out)));
  uint64_t mantissas[CHUNK_IDS];
  for (int64_t at = 0; at < count; at += CHUNK_IDS) {
    const int64_t n = count - at < CHUNK_IDS ? count - at : CHUNK_IDS;
    draw(seed, position, ids + at, n, mantissas);
    for (int64_t i = 0; i < n; i++)
      out[at + i] = (float)-log_(-log_(((double)mantissas[i] + 0.5) * 0x1p-52));
  }
}

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

/* out[i] = 2^40 e^(x[i] - the largest x) in integers, as kernels/sampling.py defines it; returns
 * their sum. The largest x must be finite. */
int64_t paceline_weights(const float *x, int64_t count, int64_t *out) {
  const uint64_t one = 1u << 30, log2_e = 1549082005;
  const float peak = largest(x, count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    const float below = peak - x[i];
    const uint64_t nats = (uint32_t)(int32_t)((below < 31.0f ? below : 31.0f) * 0x1p25f);
    const uint64_t octaves = nats * log2_e >> 25, f = octaves & (one - 1);
    uint64_t p = 123394;
    p = 1386885 - (p * f >> 30);
    p = 10304738 - (p * f >> 30);
    p = 59591844 - (p * f >> 30);
    p = 257940802 - (p * f >> 30);
    p = 744261112 - (p * f >> 30);
    p = one - (p * f >> 30);
    out[i] = (int64_t)(p << 10 >> (octaves >> 30));
    total += out[i];
  }
  return total;
}

/* ln of the sum of e^x: WIDTH partial sums in double, added up in pairs. `memory` is of `count`
 * values. The largest x must be finite. */
double paceline_logsumexp(const float *x, int64_t count, float *memory) {
  const float peak = largest(x, count);
  const vec shift = splat(peak);
  double part[WIDTH] = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_f32(memory + i, exp_(load_f32(x + i) - shift));
  if (i < count) store_part(memory, i, count - i, 0, exp_(load_part(x + i, count - i) - shift));
  for (i = 0; i < count; i++) part[i % WIDTH] += (double)memory[i];
  for (int half = WIDTH / 2; half; half /= 2)
    for (int l = 0; l < half; l++) part[l] += part[l + half];
  return (double)peak + log_(part[0]);
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

/* Of each row of logits [rows, count], `stride` apart, or 0 where all rows are the same memory: ids
 * [rows, width] of the largest scores, best first, the lower id first where they are equal, and the
 * logs [rows, width] of their softmax. Scores are the logits or, with noise [2, count], whose
 * second row is overwritten, logits / temperature + noise. Where fewer than `width` scores are
 * above -inf, the others have arbitrary ids. */
void paceline_candidates(const float *logits, int64_t stride, int64_t rows, int64_t count,
                         int64_t width, float temperature, float *noise, int64_t *ids,
                         float *logs) {
  CHECK(logits && ids && logs && rows >= 0 && count > 0 && width > 0);
  CHECK(rows < 2 || stride == 0 || stride >= count);
  CHECK(!noise || temperature > 0);
  for (int64_t r = 0; r < rows; r++, logits += stride, ids += width, logs += width) {
    const float *scores = logits;
    if (noise) {
      float *perturbed = noise + count;
      for (int64_t i = 0; i < count; i++) perturbed[i] = logits[i] / temperature + noise[i];
      scores = perturbed;
    }
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
