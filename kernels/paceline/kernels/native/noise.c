/* Philox4x32-10 for the noise of token ids; kernels/noise.py defines the words of each id.
 *
 * Words are kept in 64-bit variables, so that the compiler works on a vector of ids at once. */
#include <stdint.h>

#define ROUNDS 10
#define LOW 0xFFFFFFFFu

/* The 52-bit integers behind the noise of `count` ids at one position. */
void paceline_mantissas(uint64_t seed, uint64_t position, const int64_t *ids, int64_t count,
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
