/* Natural logarithm in double precision, with the same bits on every machine that has FMA. */
#ifndef PACELINE_LOGS_H
#define PACELINE_LOGS_H

#include <stdint.h>
#include <string.h>

/* ln x of a normal x > 0, to about 1 ulp. With x = 2^n m, m in [sqrt(1/2), sqrt(2)), and
 * s = (m - 1) / (m + 1): ln x = n ln 2 + 2 s (1 + s^2 / 3 + s^4 / 5 + ...). */
static inline __attribute__((always_inline)) double log_(double x) {
  const double high = 0x1.62e42fefa3800p-1, low = 0x1.ef35793c76730p-45; /* ln 2 */
  const uint64_t half_root = 0x3fe6a09e667f3bcdu;                        /* sqrt(1/2) */
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int64_t n = (int64_t)(bits - half_root) >> 52;
  bits -= (uint64_t)n << 52;
  double m;
  memcpy(&m, &bits, sizeof m);
  const double f = m - 1.0, s = f / (m + 1.0), z = s * s;
  double p = 1.0 / 23;
#pragma GCC unroll 10
  for (int k = 21; k >= 3; k -= 2) p = __builtin_fma(p, z, 1.0 / k);
  p = 2.0 * (s * z) * p; /* the series without its first term, 2 s */
  /* 2 s = f - s f, so that the rounding of s is multiplied with the small f. */
  const double rest = __builtin_fma(-s, f, p);
  return __builtin_fma((double)n, high, f + __builtin_fma((double)n, low, rest));
}

#endif
