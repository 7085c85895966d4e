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

#if LANES == 16
typedef __m512i ivec;
INLINE ivec load_i32(const void *p) { return _mm512_loadu_si512(p); }
INLINE ivec splat_i32(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ivec low_halves(ivec x) { return _mm512_and_si512(x, splat_i32(0x0f0f0f0f)); }
INLINE ivec high_halves(ivec x) { return low_halves(_mm512_srli_epi32(x, 4)); }
INLINE ivec add_i32(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
INLINE ivec subtract_bytes(ivec a, ivec b) { return _mm512_sub_epi8(a, b); }
INLINE vec to_float(ivec x) { return _mm512_cvtepi32_ps(x); }
INLINE vec as_float(ivec x) { return _mm512_castsi512_ps(x); }
INLINE ivec as_int(vec x) { return _mm512_castps_si512(x); }
INLINE ivec max_i32(ivec a, ivec b) { return _mm512_max_epi32(a, b); }
INLINE ivec clear_sign(vec x) { return _mm512_and_si512(as_int(x), splat_i32(0x7fffffff)); }
INLINE int32_t largest_lane(ivec x) { return _mm512_reduce_max_epi32(x); }
INLINE int32_t add_lanes(ivec x) { return _mm512_reduce_add_epi32(x); }
INLINE void store_i32(int32_t *p, ivec x) { _mm512_storeu_si512(p, x); }
INLINE void store_bytes(char *p, ivec x) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x));
}
INLINE vec load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#elif LANES == 8
typedef __m256i ivec;
INLINE ivec load_i32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE ivec splat_i32(int32_t x) { return _mm256_set1_epi32(x); }
INLINE ivec low_halves(ivec x) { return _mm256_and_si256(x, splat_i32(0x0f0f0f0f)); }
INLINE ivec high_halves(ivec x) { return low_halves(_mm256_srli_epi32(x, 4)); }
INLINE ivec add_i32(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
INLINE ivec subtract_bytes(ivec a, ivec b) { return _mm256_sub_epi8(a, b); }
INLINE vec to_float(ivec x) { return _mm256_cvtepi32_ps(x); }
INLINE vec as_float(ivec x) { return _mm256_castsi256_ps(x); }
INLINE ivec as_int(vec x) { return _mm256_castps_si256(x); }
INLINE ivec max_i32(ivec a, ivec b) { return _mm256_max_epi32(a, b); }
INLINE ivec clear_sign(vec x) { return _mm256_and_si256(as_int(x), splat_i32(0x7fffffff)); }
INLINE int32_t largest_lane(ivec x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
INLINE int32_t add_lanes(ivec x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
INLINE void store_i32(int32_t *p, ivec x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE void store_bytes(char *p, ivec x) {
  const __m256i order = _mm256_set1_epi32(0x0c080400);
  const __m256i words = _mm256_shuffle_epi8(x, order); /* the first of each half are the bytes */
  const int32_t low = _mm256_extract_epi32(words, 0), high = _mm256_extract_epi32(words, 4);
  memcpy(p, &low, sizeof low);
  memcpy(p + 4, &high, sizeof high);
}
INLINE vec load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
#else
INLINE ivec load_i32(const void *p) {
  ivec x;
  memcpy(&x, p, sizeof x);
  return x;
}
INLINE ivec splat_i32(int32_t x) { return (ivec){x, x, x, x}; }
INLINE ivec low_halves(ivec x) { return x & 0x0f0f0f0f; }
INLINE ivec high_halves(ivec x) { return (x >> 4) & 0x0f0f0f0f; }
INLINE ivec add_i32(ivec a, ivec b) { return a + b; }
typedef int8_t bvec __attribute__((vector_size(16)));
INLINE ivec subtract_bytes(ivec a, ivec b) { return (ivec)((bvec)a - (bvec)b); }
INLINE vec to_float(ivec x) { return __builtin_convertvector(x, vec); }
INLINE vec as_float(ivec x) { return (vec)x; }
INLINE ivec as_int(vec x) { return (ivec)x; }
INLINE ivec max_i32(ivec a, ivec b) { return ((a > b) & a) | (~(a > b) & b); }
INLINE ivec clear_sign(vec x) { return (ivec)x & 0x7fffffff; }
INLINE int32_t largest_lane(ivec x) {
  const int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
INLINE int32_t add_lanes(ivec x) { return x[0] + x[1] + x[2] + x[3]; }
INLINE void store_i32(int32_t *p, ivec x) { memcpy(p, &x, sizeof x); }
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
#if LANES == 16
INLINE ivec multiply_bytes(ivec a, ivec b) { return _mm512_maddubs_epi16(a, b); }
INLINE ivec multiply_pairs(ivec a, ivec b) { return _mm512_madd_epi16(a, b); }
INLINE ivec add_i16(ivec a, ivec b) { return _mm512_add_epi16(a, b); }
INLINE ivec signed_bytes(ivec x) { return _mm512_xor_si512(x, splat_i32((int)0x80808080)); }
INLINE ivec magnitudes(ivec x) { return _mm512_abs_epi8(x); }
INLINE ivec with_signs(ivec a, ivec w) {
  return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w), splat_i32(0), a);
}
#else
INLINE ivec multiply_bytes(ivec a, ivec b) { return _mm256_maddubs_epi16(a, b); }
INLINE ivec multiply_pairs(ivec a, ivec b) { return _mm256_madd_epi16(a, b); }
INLINE ivec add_i16(ivec a, ivec b) { return _mm256_add_epi16(a, b); }
INLINE ivec signed_bytes(ivec x) { return _mm256_xor_si256(x, splat_i32((int)0x80808080)); }
INLINE ivec magnitudes(ivec x) { return _mm256_abs_epi8(x); }
INLINE ivec with_signs(ivec a, ivec w) { return _mm256_sign_epi8(a, w); }
#endif
INLINE int32_t dot_offset(const int four) { return four ? 0 : 128; }
INLINE ivec begin_sum(const int four, int32_t start) { return splat_i32(four ? 0 : start); }
INLINE ivec end_sum(const int four, ivec sum, int32_t start) {
  return four ? add_i32(multiply_pairs(sum, splat_i32(0x00010001)), splat_i32(start)) : sum;
}
INLINE ivec dot(const int four, ivec sum, ivec weights, const char *a) {
  const ivec x = splat_i32(word_at(a));
  if (four) {
    sum = add_i16(sum, multiply_bytes(weights, x));
  } else {
    const ivec w = signed_bytes(weights);
    const ivec pairs = multiply_bytes(magnitudes(w), with_signs(x, w));
    sum = add_i32(sum, multiply_pairs(pairs, splat_i32(0x00010001)));
  }
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
