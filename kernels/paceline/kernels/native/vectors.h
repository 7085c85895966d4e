/* Vectors of 16 floats in GCC's portable vector extension, and conversions from and to bfloat16.
 *
 * Every operation here works lane by lane, so the result for a value never depends on its
 * neighbours or on how many there are. That, and a fixed order of every sum, is what gives a row
 * the same bits in any batch. */
#ifndef PACELINE_VECTORS_H
#define PACELINE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(32), aligned(2), may_alias));

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec fma_(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

INLINE vec select_(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

INLINE vec max_(vec a, vec b) { return select_(a > b, a, b); }

typedef struct {
  void *data; /* slot s of kv head h: data + h * head_stride + s * slot_stride, in elements */
  int64_t head_stride, slot_stride;
} Cache;

INLINE vec load_f32(const float *p) {
  vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store_f32(float *p, vec x) { memcpy(p, &x, sizeof x); }

INLINE vec load_bf16(const uint16_t *p) {
  hvec h;
  memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
}

/* Rounds to nearest, ties to even; a NaN stays one. */
INLINE void store_bf16(uint16_t *p, vec x) {
  uvec bits = (uvec)x;
  uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uvec nan = (uvec)(x != x);
  hvec h = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), hvec);
  memcpy(p, &h, sizeof h);
}

/* An array of float32 or bfloat16 values. */
INLINE vec load_any(const void *base, int64_t at, int bf16) {
  return bf16 ? load_bf16((const uint16_t *)base + at) : load_f32((const float *)base + at);
}

INLINE void store_any(void *base, int64_t at, int bf16, vec x) {
  if (bf16)
    store_bf16((uint16_t *)base + at, x);
  else
    store_f32((float *)base + at, x);
}

/* The first `count` lanes only. */
INLINE vec load_part(const void *base, int64_t at, int64_t count, int bf16) {
  char part[sizeof(vec)] = {0};
  const int64_t size = bf16 ? 2 : 4;
  if (count >= LANES) return load_any(base, at, bf16);
  memcpy(part, (const char *)base + at * size, (size_t)(count * size));
  return load_any(part, 0, bf16);
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

/* Sum of the lanes, always in the same order. */
INLINE float add_lanes(vec x) {
  float part[LANES];
  store_f32(part, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

/* e^x to about 1 ulp, exactly 0 below -87 (minus infinity included), e^88 from 88 on. */
INLINE vec exp_(vec x) {
  const vec magic = splat(12582912.0f); /* adding it rounds to a whole number */
  ivec vanishes = x < splat(-87.0f);
  x = select_(vanishes, splat(0.0f), x);
  x = select_(x > splat(88.0f), splat(88.0f), x);
  vec shifted = fma_(x, splat(1.44269504088896341f), magic);
  ivec power = (ivec)shifted - (ivec)magic;
  vec whole = shifted - magic;
  vec r = fma_(whole, splat(-0.693359375f), x);
  r = fma_(whole, splat(2.12194440e-4f), r);
  vec p = splat(1.9875691500e-4f);
  p = fma_(p, r, splat(1.3981999507e-3f));
  p = fma_(p, r, splat(8.3334519073e-3f));
  p = fma_(p, r, splat(4.1665795894e-2f));
  p = fma_(p, r, splat(1.6666665459e-1f));
  p = fma_(p, r, splat(5.0000001201e-1f));
  p = fma_(p, r * r, r) + splat(1.0f);
  vec scaled = (vec)((ivec)p + (power << 23));
  return select_(vanishes, splat(0.0f), scaled);
}

#endif
