/* Vectors of floats, and conversions from and to bfloat16, for AVX-512, AVX2 and anything else.
 *
 * Loads, stores and fused products are intrinsics: compilers may move a generic 64-byte vector
 * through the stack in halves. Every operation works lane by lane, and only FMA is fused, so a
 * value has the same bits at every level and for every number of lanes. */
#ifndef PACELINE_VECTORS_H
#define PACELINE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "limits.h"

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define LANES 16
#define COLUMN_VECTORS 4 /* vectors processed at once: with 6 rows they fill the registers */
typedef __m512 vec;
typedef __m512i ivec;
#define INTEL(name) _mm512_##name
#define LOAD_HALVES(p) _mm256_loadu_si256((const __m256i *)(p)) /* 16 bits a lane */
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define COLUMN_VECTORS 2
typedef __m256 vec;
typedef __m256i ivec;
#define INTEL(name) _mm256_##name
#define LOAD_HALVES(p) _mm_loadu_si128((const __m128i *)(p))
#else
#define LANES 4
#define COLUMN_VECTORS 4
typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
#endif
typedef int32_t svec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES))); /* sums of bits may overflow */

#ifdef INTEL
INLINE vec splat(float x) { return INTEL(set1_ps)(x); }
INLINE vec load_f32(const float *p) { return INTEL(loadu_ps)(p); }
INLINE void store_f32(float *p, vec x) { INTEL(storeu_ps)(p, x); }
INLINE vec fma_(vec a, vec b, vec c) { return INTEL(fmadd_ps)(a, b, c); }
INLINE vec max_(vec a, vec b) { return INTEL(max_ps)(a, b); }
INLINE vec min_(vec a, vec b) { return INTEL(min_ps)(a, b); }
INLINE vec load_bf16(const uint16_t *p) {
  return (vec)((uvec)INTEL(cvtepu16_epi32)(LOAD_HALVES(p)) << 16);
}
#else /* plain C: the reference for the other levels, and the code for ARM */
INLINE vec splat(float x) { return (vec){x, x, x, x}; }
INLINE vec load_f32(const float *p) {
  vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store_f32(float *p, vec x) { memcpy(p, &x, sizeof x); }
INLINE vec fma_(vec a, vec b, vec c) {
  vec x;
  for (int i = 0; i < LANES; i++) x[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return x;
}
INLINE vec select_(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec max_(vec a, vec b) { return select_(a > b, a, b); }
INLINE vec min_(vec a, vec b) { return select_(a < b, a, b); }
INLINE vec load_bf16(const uint16_t *p) { return (vec)((uvec){p[0], p[1], p[2], p[3]} << 16); }
#endif

/* x with 0 where `test` is below `bound`. */
INLINE vec zero_below(vec test, vec bound, vec x) {
#if LANES == 16
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, bound, _CMP_NLT_UQ), x);
#else
  return (vec)(~(svec)(test < bound) & (svec)x);
#endif
}

/* x times 2^n, n the whole number in the low 9 bits of `shifted`. */
INLINE vec scale_(vec x, vec shifted) { return (vec)((uvec)x + ((uvec)shifted << 23)); }

/* 2 LANES bfloat16 values in memory order, as even and odd ones. */
INLINE void split_bf16(vec pairs, vec *even, vec *odd) {
  *even = (vec)((uvec)pairs << 16);
  *odd = (vec)((uvec)pairs & 0xffff0000u);
}

INLINE void store_bf16(uint16_t *p, vec x) {
  const uvec nan = (uvec)(x != x), bits = (uvec)x;
  const uvec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uvec halves = (nan & 0x7fc0) | (~nan & rounded);
#if LANES == 16
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((ivec)halves));
#elif LANES == 8
  const ivec both = _mm256_packus_epi32((ivec)halves, (ivec)halves);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08)));
#else
  for (int i = 0; i < LANES; i++) p[i] = (uint16_t)halves[i];
#endif
}

/* x[i][j] becomes x[j][i]. */
INLINE void transpose(vec x[LANES]) {
#ifdef INTEL
  vec y[LANES];
  for (int i = 0; i < LANES; i += 4) { /* 4 x 4 blocks within 128 bits */
    vec a = INTEL(unpacklo_ps)(x[i], x[i + 1]), b = INTEL(unpackhi_ps)(x[i], x[i + 1]);
    vec c = INTEL(unpacklo_ps)(x[i + 2], x[i + 3]), d = INTEL(unpackhi_ps)(x[i + 2], x[i + 3]);
    y[i] = INTEL(shuffle_ps)(a, c, 0x44), y[i + 1] = INTEL(shuffle_ps)(a, c, 0xee);
    y[i + 2] = INTEL(shuffle_ps)(b, d, 0x44), y[i + 3] = INTEL(shuffle_ps)(b, d, 0xee);
  }
  for (int i = 0; i < 4; i++) { /* then whole blocks */
#if LANES == 16
    vec a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88);
    vec b = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd);
    vec c = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88);
    vec d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
    x[i] = _mm512_shuffle_f32x4(a, c, 0x88), x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
#else
    x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
#endif
  }
#else
  float y[LANES][LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) y[j][i] = x[i][j];
  memcpy(x, y, sizeof y);
#endif
}

/* Stores as bfloat16 what is 0 or normal. */
INLINE void store_normal_bf16(uint16_t *p, vec x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  store_bf16(p, x);
#endif
}

/* Vectors of 64-bit words. */
typedef uint64_t wvec __attribute__((vector_size(4 * LANES)));

/* Products of the low halves of words. */
INLINE wvec multiply_low(wvec a, wvec b) {
#ifdef INTEL
  return (wvec)INTEL(mul_epu32)((ivec)a, (ivec)b);
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

/* x, or 0 where it is denormal. */
INLINE vec flush_(vec x) { return zero_below(max_(x, splat(0.0f) - x), splat(0x1p-126f), x); }

/* sum + a * b over pairs of bfloat16: an FMA of the odd ones, then one of the even ones, with
 * denormal numbers as 0. The signs of zeros are not defined. */
INLINE vec dot_plain(vec sum, vec a, vec b) {
  vec x[2], y[2];
  split_bf16(a, &x[0], &x[1]);
  split_bf16(b, &y[0], &y[1]);
  for (int i = 1; i >= 0; i--) sum = flush_(fma_(flush_(x[i]), flush_(y[i]), flush_(sum)));
  return sum;
}

/* The same by the instruction, where the level has it. */
INLINE vec dot_pairs(vec sum, vec a, vec b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  return dot_plain(sum, a, b);
#endif
}

/* Sum of WIDTH partial sums, always in the same order; overwrites them. */
INLINE float add_up(float part[WIDTH]) {
#pragma GCC unroll 4
  for (int half = WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int l = 0; l < half; l++) part[l] += part[l + half];
  return part[0];
}

/* The same of vectors. */
INLINE float add_vectors(const vec part[WIDTH / LANES]) {
#if LANES == 16
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(part[0]), 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(part[0]), high);
#elif LANES == 8
  const __m256 eight = _mm256_add_ps(part[0], part[1]);
#endif
#if LANES >= 8
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  float lanes[WIDTH];
  for (int i = 0; i < WIDTH / LANES; i++) store_f32(lanes + i * LANES, part[i]);
  return add_up(lanes);
#endif
}

INLINE float max_lane(vec x) {
#if LANES >= 8
#if LANES == 16
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), high);
#else
  const __m256 eight = x;
#endif
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#endif
  float part[LANES];
  store_f32(part, x);
#pragma GCC unroll 4
  for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int l = 0; l < half; l++) part[l] = part[l] > part[l + half] ? part[l] : part[l + half];
  return part[0];
}

typedef struct {
  void *data; /* slot s of kv head h: data + h * head_stride + s * slot_stride, in elements */
  int64_t head_stride, slot_stride, slots;
} Cache;

/* An array of float32 or bfloat16 values. Storing rounds to nearest, ties to even; NaN stays NaN.
 */
INLINE vec load_any(const void *base, int64_t at, int bf16) {
  return bf16 ? load_bf16((const uint16_t *)base + at) : load_f32((const float *)base + at);
}

INLINE void store_any(void *base, int64_t at, int bf16, vec x) {
  if (bf16)
    store_bf16((uint16_t *)base + at, x);
  else
    store_f32((float *)base + at, x);
}

/* The first `count` lanes only, the others 0. */
INLINE vec load_part(const float *base, int64_t count) {
#if LANES == 16
  return _mm512_maskz_loadu_ps(_bzhi_u32(0xffff, (unsigned)(count < LANES ? count : LANES)), base);
#endif
  float part[LANES] = {0};
  if (count >= LANES) return load_f32(base);
  memcpy(part, base, (size_t)count * sizeof(float));
  return load_f32(part);
}

INLINE void store_part(void *base, int64_t at, int64_t count, int bf16, vec x) {
  char part[sizeof(vec)];
  const int64_t size = bf16 ? 2 : 4;
  if (count >= LANES) {
    store_any(base, at, bf16, x);
    return;
  }
  store_any(part, 0, bf16, x);
  memcpy((char *)base + at * size, part, (size_t)(count * size));
}

/* Cases 1 to `most` of a switch by a number of rows. In a case it is a literal, so that loops over
 * rows are unrolled and sums stay in registers; with a variable number they would be in memory. */
#define CASES_TO(most, CASE) CASES_TO_(most, CASE)
#define CASES_TO_(most, CASE) CASES_##most(CASE)
#define CASES_3(CASE) CASE(1) CASE(2) CASE(3)
#define CASES_4(CASE) CASES_3(CASE) CASE(4)
#define CASES_6(CASE) CASES_4(CASE) CASE(5) CASE(6)
#define CASES_10(CASE) CASES_6(CASE) CASE(7) CASE(8) CASE(9) CASE(10)
#define CASES_12(CASE) CASES_10(CASE) CASE(11) CASE(12)

/* Constants of exp_. AVX2 has too few registers for all of them in a loop, so they are loaded where
 * they are used; the compiler must not know that the pointer is constant, or it would copy them to
 * the stack before the loop. */
static const float EXP[10] = {
    1.44269504088896341f, -0.693359375f,    2.12194440e-4f,   1.9875691500e-4f, 1.3981999507e-3f,
    8.3334519073e-3f,     4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 88.0f};

/* e^x to about 1 ulp, exactly 0 below -87 (minus infinity included), e^88 from 88 on. */
INLINE vec exp_(vec x) {
  const float *k = EXP;
  if (LANES < 16) __asm__ volatile("" : "+r"(k));
  const vec magic = splat(12582912.0f), lowest = splat(-87.0f); /* magic: rounds to whole numbers */
  x = min_(splat(k[9]), x);                                     /* in this order a NaN stays one */
  vec shifted = fma_(x, splat(k[0]), magic);
  vec whole = shifted - magic;
  vec r = fma_(whole, splat(k[1]), x);
  r = fma_(whole, splat(k[2]), r);
  vec p = splat(k[3]);
  for (int i = 4; i < 9; i++) p = fma_(p, r, splat(k[i]));
  p = fma_(p, r * r, r) + splat(1.0f);
  return zero_below(x, lowest, scale_(p, shifted));
}

INLINE float exp_one(float x) {
  float lanes[LANES];
  store_f32(lanes, exp_(splat(x)));
  return lanes[0];
}

/* ln x of a normal x > 0, to about 1 ulp. With x = 2^n m, m in [sqrt(1/2), sqrt(2)), and
 * s = (m - 1) / (m + 1): ln x = n ln 2 + 2 s (1 + s^2 / 3 + s^4 / 5 + ...). */
INLINE double log_(double x) {
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

/* cap * tanh(x / cap). */
INLINE vec cap_(vec x, float cap) {
  const vec one = splat(1.0f), two = splat(2.0f);
  return splat(cap) * (one - two / (exp_(x * splat(2.0f / cap)) + one));
}

#endif
