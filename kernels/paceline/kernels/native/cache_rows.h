/* Rows of KV caches: a head's values at one position, as float32, bfloat16 or in 8 bits.
 *
 * A row in 8 bits is `dim` signed bytes and then their scale, a float32 at any address. With
 * m = max|x|, scale = m / 127 and a byte is x * (1 / scale) rounded to the nearest integer, ties to
 * even. Where m < 2^-100, all are 0. Where a value is infinite or NaN, the scale is NaN. */
#ifndef PACELINE_CACHE_ROWS_H
#define PACELINE_CACHE_ROWS_H

#include "vectors.h"

enum { KV_F32, KV_BF16, KV_INT8 };

INLINE vec load_i8(const int8_t *p) {
#if LANES == 16
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif LANES == 8
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  return (vec){p[0], p[1], p[2], p[3]};
#endif
}

/* Byte `index` of every lane, with its sign. */
INLINE vec byte_of(vec x, const int index) {
  return __builtin_convertvector((svec)((uvec)x << (24 - 8 * index)) >> 24, vec);
}

/* Values of a row, without the scale of 8 bits. */
INLINE vec load_kv(const void *base, int64_t at, int type) {
  return type == KV_INT8 ? load_i8((const int8_t *)base + at) : load_any(base, at, type);
}

/* Value `i` of the 32-bit words of LANES rows. */
INLINE vec value_of(vec words, const int type, const int i) {
  if (type == KV_INT8) return byte_of(words, i);
  if (type == KV_F32) return words;
  vec pair[2];
  split_bf16(words, &pair[0], &pair[1]);
  return pair[i];
}

INLINE int64_t kv_size(int type) { return type == KV_F32 ? 4 : type == KV_BF16 ? 2 : 1; }

/* The scale of the row in 8 bits at element `at`. */
INLINE float scale_of(const Cache *c, int64_t at, int64_t dim) {
  float scale;
  memcpy(&scale, (const int8_t *)c->data + at + dim, sizeof scale);
  return scale;
}

/* Writes a row in 8 bits at element `at`. */
INLINE void store_i8(const Cache *c, int64_t at, const float *x, int64_t dim) {
  int8_t *out = (int8_t *)c->data + at;
  uint32_t largest = 0;
  float m, scale = 0.0f, inverse = 0.0f;
  for (int64_t i = 0; i < dim; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  memcpy(&m, &largest, sizeof m);
  if (largest >= 0x7f800000) {
    scale = NAN;
  } else if (m >= 0x1p-100f) {
    scale = m / 127.0f;
    inverse = 1.0f / scale;
  }
  for (int64_t i = 0; i < dim; i++) { /* the addition rounds to a whole number, ties to even */
    const float rounded = x[i] * inverse + 12582912.0f;
    int32_t whole;
    memcpy(&whole, &rounded, sizeof whole);
    out[i] = inverse == 0.0f ? 0 : (int8_t)(whole - 0x4b400000);
  }
  memcpy(out + dim, &scale, sizeof scale);
}

#endif
