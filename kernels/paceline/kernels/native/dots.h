/* Integer products: 4 stored bytes (0 .. 255) times 4 activations (-127 .. 127) in every lane of
 * int32, exact at every level; and float16 scales. A vector has LANES lanes, as in vectors.h. */
#ifndef PACELINE_DOTS_H
#define PACELINE_DOTS_H

#include "vectors.h"

#define SHIFT 12582912.0f /* 3 * 2^22: a float whose last bit is 1 */
#define SHIFT_BITS 0x4b400000

/* float16 to float32, exact; infinities and NaN do not occur. */
INLINE float half_to_float(uint16_t half) {
  const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  float magnitude;
  memcpy(&magnitude, &bits, sizeof bits);
  magnitude *= 0x1p112f;
  return half & 0x8000 ? -magnitude : magnitude;
}

typedef uint8_t bvec __attribute__((vector_size(4 * LANES)));
typedef ivec anywhere __attribute__((aligned(1), may_alias)); /* in memory of any type */
INLINE ivec load_i32(const void *p) { return *(const anywhere *)p; }
INLINE void store_i32(void *p, ivec x) { *(anywhere *)p = x; }
INLINE ivec splat_i32(int32_t x) { return (ivec)((svec){0} + x); }
INLINE ivec low_halves(ivec x) { return (ivec)((uvec)x & 0x0f0f0f0f); }
INLINE ivec high_halves(ivec x) { return (ivec)((uvec)x >> 4 & 0x0f0f0f0f); }
INLINE ivec add_i32(ivec a, ivec b) { return (ivec)((uvec)a + (uvec)b); }
INLINE ivec subtract_bytes(ivec a, ivec b) { return (ivec)((bvec)a - (bvec)b); }
INLINE vec to_float(ivec x) { return __builtin_convertvector((svec)x, vec); }
INLINE vec as_float(ivec x) { return (vec)x; }
INLINE ivec as_int(vec x) { return (ivec)x; }
INLINE ivec clear_sign(vec x) { return (ivec)((uvec)x & 0x7fffffff); }
#ifdef INTEL
INLINE ivec max_i32(ivec a, ivec b) { return INTEL(max_epi32)(a, b); }
INLINE vec load_f16(const uint16_t *p) { return INTEL(cvtph_ps)(LOAD_HALVES(p)); }
#endif
#if LANES == 16
INLINE int32_t largest_lane(ivec x) { return _mm512_reduce_max_epi32(x); }
INLINE int32_t add_lanes(ivec x) { return _mm512_reduce_add_epi32(x); }
INLINE void store_bytes(char *p, ivec x) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x));
}
#elif LANES == 8
#define FOLD(of, x)                                                          \
  __m128i y = of(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); \
  y = of(y, _mm_shuffle_epi32(y, 0x4e));                                     \
  return _mm_cvtsi128_si32(of(y, _mm_shuffle_epi32(y, 0xb1)))
INLINE int32_t largest_lane(ivec x) { FOLD(_mm_max_epi32, x); }
INLINE int32_t add_lanes(ivec x) { FOLD(_mm_add_epi32, x); }
INLINE void store_bytes(char *p, ivec x) {
  const ivec order = _mm256_set1_epi32(0x0c080400);
  const ivec words = _mm256_shuffle_epi8(x, order); /* the first of each half */
  const int32_t low = _mm256_extract_epi32(words, 0), high = _mm256_extract_epi32(words, 4);
  memcpy(p, &low, sizeof low);
  memcpy(p + 4, &high, sizeof high);
}
#else
INLINE ivec max_i32(ivec a, ivec b) { return ((a > b) & a) | (~(a > b) & b); }
INLINE int32_t largest_lane(ivec x) {
  const int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
INLINE int32_t add_lanes(ivec x) { return x[0] + x[1] + x[2] + x[3]; }
INLINE void store_bytes(char *p, ivec x) {
  for (int i = 0; i < LANES; i++) p[i] = (char)x[i];
}
INLINE vec load_f16(const uint16_t *p) {
  return (vec){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
#endif

INLINE int32_t word_at(const void *p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

/* Keeps GCC from adding in another order, which needs more registers than there are. */
#define IN_ORDER(sum) __asm__("" : "+v"(sum))

/* Where bytes are multiplied and added in pairs to 16 bits, with saturation. */
#if LANES >= 8 && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define PAIRS_OF_BYTES
#endif

/* The sum of a block: begin_sum(), dot() for each 4 inputs, end_sum(). dot() adds the products of 4
 * stored values of each output, `four` bits or 8, less dot_offset(), with the 4 activations at `a`.
 * end_sum() adds `start`, if begin_sum() has not. */
#ifdef PAIRS_OF_BYTES
/* With 4-bit weights nothing saturates, and the sums of a block fit 16 bits: 32 / 2 pairs of 15 *
 * 127 in two lanes are 30,480. With 8 bits, magnitudes of signed weights are multiplied with
 * activations that have their signs: 2 * 128 * 127 fits too. */
typedef int16_t hvec __attribute__((vector_size(4 * LANES)));
INLINE hvec multiply_bytes(ivec a, ivec b) { return (hvec)INTEL(maddubs_epi16)(a, b); }
INLINE ivec add_pairs(hvec x) { return INTEL(madd_epi16)((ivec)x, splat_i32(0x00010001)); }
INLINE ivec with_signs(ivec a, ivec w) {
#if LANES == 16
  return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w), _mm512_setzero_si512(), a);
#else
  return _mm256_sign_epi8(a, w);
#endif
}
INLINE int32_t dot_offset(const int four) { return four ? 0 : 128; }
INLINE ivec begin_sum(const int four, int32_t start) { return splat_i32(four ? 0 : start); }
INLINE ivec end_sum(const int four, ivec sum, int32_t start) {
  return four ? add_i32(add_pairs((hvec)sum), splat_i32(start)) : sum;
}
INLINE ivec dot(const int four, ivec sum, ivec weights, const char *a) {
  const ivec x = splat_i32(word_at(a)), w = (ivec)((uvec)weights ^ 0x80808080u);
  if (four)
    sum = (ivec)((hvec)sum + multiply_bytes(weights, x));
  else
    sum = add_i32(sum, add_pairs(multiply_bytes(INTEL(abs_epi8)(w), with_signs(x, w))));
  IN_ORDER(sum);
  return sum;
}
#else
INLINE ivec begin_sum(const int four, int32_t start) { return splat_i32(start); }
INLINE ivec end_sum(const int four, ivec sum, int32_t start) { return sum; }
#if LANES == 16
INLINE int32_t dot_offset(const int four) { return 0; }
INLINE ivec dot(const int four, ivec sum, ivec weights, const char *a) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(splat_i32(word_at(a))));
  return sum;
}
#elif LANES == 8
INLINE int32_t dot_offset(const int four) { return 0; }
INLINE ivec dot(const int four, ivec sum, ivec weights, const char *a) {
  sum = _mm256_dpbusd_avx_epi32(sum, weights, splat_i32(word_at(a)));
  IN_ORDER(sum);
  return sum;
}
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
INLINE int32_t dot_offset(const int four) { return 128; } /* both operands are signed */
INLINE ivec dot(const int four, ivec sum, ivec weights, const char *a) {
  const int8x16_t w = (int8x16_t)(weights ^ (int32_t)0x80808080),
                  x = (int8x16_t)splat_i32(word_at(a));
  return (ivec)vdotq_s32((int32x4_t)sum, w, x);
}
#else
INLINE int32_t dot_offset(const int four) { return 0; }
INLINE ivec dot(const int four, ivec sum, ivec weights, const char *a) {
  for (int byte = 0; byte < 4; byte++)
    sum += (weights >> 8 * byte & 255) * ((const int8_t *)a)[byte];
  return sum;
}
#endif
#endif

#endif
