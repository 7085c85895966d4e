/* Integer products: 4 stored bytes (0 .. 255) times 4 activations (-127 .. 127) in every lane of
 * int32, exact at every level; and float16 scales. A vector has LANES lanes, as in vectors.h. */
#ifndef PACELINE_DOTS_H
#define PACELINE_DOTS_H

#include "vectors.h"

/* What dot() subtracts from the stored bytes. */
#define DOT_OFFSET 0

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
INLINE vec to_float(ivec x) { return _mm512_cvtepi32_ps(x); }
INLINE vec as_float(ivec x) { return _mm512_castsi512_ps(x); }
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
INLINE vec to_float(ivec x) { return _mm256_cvtepi32_ps(x); }
INLINE vec as_float(ivec x) { return _mm256_castsi256_ps(x); }
INLINE vec load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
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
INLINE vec to_float(ivec x) { return __builtin_convertvector(x, vec); }
INLINE vec as_float(ivec x) { return (vec)x; }
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

/* dot(sum, weights, a): sum + weights times the 4 activations at `a`. */
#if LANES == 16 && defined(__AVX512VNNI__)
typedef int8_t activation;
INLINE ivec dot(ivec sum, ivec weights, const activation *a) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(splat_i32(word_at(a))));
  return sum;
}
#elif LANES == 8 && defined(__AVXVNNI__)
typedef int8_t activation;
INLINE ivec dot(ivec sum, ivec weights, const activation *a) {
  sum = _mm256_dpbusd_avx_epi32(sum, weights, splat_i32(word_at(a)));
  IN_ORDER(sum);
  return sum;
}
#elif LANES >= 8
/* Without VNNI: bytes become 16 bits, since products of bytes are added with saturation. The
 * activations are stored as 0, 2, 1, 3: beside even bytes, then beside odd ones. */
#define SPLIT_ACTIVATIONS
typedef int16_t activation;
#if LANES == 16
INLINE ivec multiply_pairs(ivec a, ivec b) { return _mm512_madd_epi16(a, b); }
INLINE ivec even_bytes(ivec x) { return _mm512_and_si512(x, splat_i32(0x00ff00ff)); }
INLINE ivec odd_bytes(ivec x) { return _mm512_srli_epi16(x, 8); }
#else
INLINE ivec multiply_pairs(ivec a, ivec b) { return _mm256_madd_epi16(a, b); }
INLINE ivec even_bytes(ivec x) { return _mm256_and_si256(x, splat_i32(0x00ff00ff)); }
INLINE ivec odd_bytes(ivec x) { return _mm256_srli_epi16(x, 8); }
#endif
INLINE ivec dot(ivec sum, ivec weights, const activation *a) {
  sum = add_i32(sum, multiply_pairs(even_bytes(weights), splat_i32(word_at(a))));
  sum = add_i32(sum, multiply_pairs(odd_bytes(weights), splat_i32(word_at(a + 2))));
  IN_ORDER(sum);
  return sum;
}
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#undef DOT_OFFSET
#define DOT_OFFSET 128 /* both operands are signed */
typedef int8_t activation;
INLINE ivec dot(ivec sum, ivec weights, const activation *a) {
  const int8x16_t w = (int8x16_t)(weights ^ (int32_t)0x80808080), x = (int8x16_t)splat_i32(word_at(a));
  return (ivec)vdotq_s32((int32x4_t)sum, w, x);
}
#else
typedef int8_t activation;
INLINE ivec dot(ivec sum, ivec weights, const activation *a) {
  for (int byte = 0; byte < 4; byte++) sum += (weights >> 8 * byte & 255) * a[byte];
  return sum;
}
#endif

#endif
