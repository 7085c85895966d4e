/* Noise and probabilities of tokens, with the same bits on every machine. */
#include "logs.h"
#include "vectors.h"

#define ROUNDS 10
#define LOW 0xFFFFFFFFu
#define BLOCK_IDS 512

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
  uint64_t mantissas[BLOCK_IDS];
  for (int64_t at = 0; at < count; at += BLOCK_IDS) {
    const int64_t n = count - at < BLOCK_IDS ? count - at : BLOCK_IDS;
    draw(seed, position, ids + at, n, mantissas);
    for (int64_t i = 0; i < n; i++)
      out[at + i] = (float)-log_(-log_(((double)mantissas[i] + 0.5) * 0x1p-52));
  }
}

/* out[i] = e^(x[i] - the largest x); returns the sum in double: WIDTH partial sums, added up in
 * pairs. The largest x, which goes to *peak, must be finite. */
double paceline_exponentials(const float *x, int64_t count, float *peak, float *out) {
  double part[WIDTH] = {0};
  *peak = -INFINITY;
  for (int64_t i = 0; i < count; i++) *peak = x[i] > *peak ? x[i] : *peak;
  const vec shift = splat(*peak);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_f32(out + i, exp_(load_f32(x + i) - shift));
  if (i < count) store_part(out, i, count - i, 0, exp_(load_part(x, i, count - i, 0) - shift));
  for (i = 0; i < count; i++) part[i % WIDTH] += (double)out[i];
  for (int half = WIDTH / 2; half; half /= 2)
    for (int l = 0; l < half; l++) part[l] += part[l + half];
  return part[0];
}

/* ln of the sum of e^x; `memory` is of `count` values. The largest x must be finite. */
double paceline_logsumexp(const float *x, int64_t count, float *memory) {
  float peak;
  const double sum = paceline_exponentials(x, count, &peak, memory);
  return (double)peak + log_(sum);
}
