/* Linear layers with weights in 8 or 4 bits: exact integer sums in blocks of 32 inputs, scaled and
 * added in one chain over the blocks. */
#ifndef PACELINE_LINEAR_BLOCKS_H
#define PACELINE_LINEAR_BLOCKS_H

#include "dots.h"
#include "linear_units.h"

#define BLOCK_INS 32
#define SHIFT 12582912.0f /* 3 * 2^22: a float whose last bit is 1 */
#define SHIFT_BITS 0x4b400000
#if LANES == 16 && !defined(SPLIT_ACTIVATIONS)
#define BLOCK_ROWS 8 /* two vectors of integer sums a row in registers; most totals are in memory */
#elif LANES == 16
#define BLOCK_ROWS 4
#elif LANES == 8
#define BLOCK_ROWS 2
#else
#define BLOCK_ROWS 3
#endif

/* What a row's activations in one block of inputs contribute beside their values. */
typedef struct {
  float scale, sum; /* sum: scale times the sum of the values */
  int32_t start;    /* of the integer sum: SHIFT less what the offset of the weights takes away */
  int32_t unused;   /* keeps the size a multiple of 16 */
} Factors;

typedef struct {
  activation values[BLOCK_INS];
  Factors factors;
} Activations;

/* Quantises a block of a row, see linear.h. */
INLINE Factors quantise(const float *x, int64_t offset, int32_t value[BLOCK_INS]) {
  uint32_t bits[BLOCK_INS], largest = 0;
  int32_t sum = 0;
  float m, scale = 0.0f, inverse = 0.0f;
  memcpy(bits, x, sizeof bits);
  for (int i = 0; i < BLOCK_INS; i++) {
    const uint32_t magnitude = bits[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  memcpy(&m, &largest, sizeof m);
  if (largest >= 0x7f800000) { /* infinite or NaN */
    scale = NAN;
  } else if (m >= 0x1p-100f) {
    scale = m / 127.0f;
    inverse = 1.0f / scale;
  }
  for (int i = 0; i < BLOCK_INS; i++) { /* the addition rounds to a whole number, ties to even */
    const float rounded = x[i] * inverse + SHIFT;
    int32_t whole;
    memcpy(&whole, &rounded, sizeof whole);
    value[i] = inverse == 0.0f ? 0 : whole - SHIFT_BITS;
    sum += value[i];
  }
  return (Factors){scale, scale * (float)sum, SHIFT_BITS - (int32_t)offset * sum, 0};
}

/* Row `row` of x. Within a block of rows, activations are in the order [ins / 32][rows]. */
static void quantise_row(const Matrix *m, const float *x, int64_t rows, Activations *out,
                         int64_t row) {
  const RowBlock in = row_block(rows, BLOCK_ROWS, row);
  const int64_t blocks = m->ins / BLOCK_INS;
  out += in.first * blocks + (row - in.first);
  for (int64_t b = 0; b < blocks; b++, out += in.count) {
    int32_t value[BLOCK_INS];
    out->factors = quantise(x + row * m->ins + b * BLOCK_INS, m->offset - DOT_OFFSET, value);
    for (int i = 0; i < BLOCK_INS; i++) {
#ifdef SPLIT_ACTIVATIONS
      out->values[(i & ~3) + 2 * (i & 1) + (i >> 1 & 1)] = (activation)value[i];
#else
      out->values[i] = (activation)value[i];
#endif
    }
  }
}

INLINE vec load_scale(const char *p, int64_t block, int f16) {
  return f16 ? load_f16((const uint16_t *)p + block * PANEL) : load_f32((const float *)p + block * PANEL);
}

/* Sums of a block, with SHIFT, times the scales of the weights: one rounding. SHIFT makes a whole
 * number the low bits of a float. Its product with a float16 scale is exact. */
INLINE vec scaled(ivec sum, vec scale, vec shift, int f16) {
  if (f16) return fma_(as_float(sum), scale, shift);
  return fma_(to_float(add_i32(sum, splat_i32(-SHIFT_BITS))), scale, splat(0.0f));
}

/* UNIT outputs, from `first` on, of `rows` rows. */
INLINE void quantised_block(const int rows, const int four, const Matrix *m, const Activations *a,
                            float *out, int64_t first) {
  const int64_t blocks = m->ins / BLOCK_INS, panel = m->ins * PANEL / (four ? 2 : 1);
  const int f16 = (int)m->scales_f16, factor = f16 ? 2 : 4;
  const char *weights[VECTORS], *scales[VECTORS], *minima[VECTORS];
  vec total[BLOCK_ROWS][VECTORS];
  float totals[BLOCK_ROWS * UNIT];
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    const int64_t at = first + v * LANES, factors = blocks * PANEL * factor;
    weights[v] = place(m->values, panel, 64, at);
    scales[v] = place(m->scales, factors, PANEL * factor, at);
    minima[v] = m->minima ? place(m->minima, factors, PANEL * factor, at) : 0;
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) total[r][v] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t b = 0; b < blocks; b++, a += rows) {
    ivec sum[BLOCK_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[r][v] = splat_i32(a[r].factors.start);
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_INS; i += 8) {
      ivec line[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) line[v] = load_i32(weights[v]);
#pragma GCC unroll 2
      for (int next = 0; next < 2; next++) { /* 4 inputs after the other */
        ivec w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          w[v] = next ? load_i32(weights[v] + 64) : line[v];
          if (four) w[v] = next ? high_halves(line[v]) : low_halves(line[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++)
            sum[r][v] = dot(sum[r][v], w[v], a[r].values + i + 4 * next);
      }
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) weights[v] += four ? 64 : 128;
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const vec scale = load_scale(scales[v], b, f16), shift = scale * splat(-SHIFT);
      const vec minimum = m->minima ? load_scale(minima[v], b, f16) : scale;
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const vec x = scaled(sum[r][v], scale, shift, f16);
        total[r][v] = fma_(x, splat(a[r].factors.scale), total[r][v]);
        if (m->minima) total[r][v] = fma_(minimum, splat(a[r].factors.sum), total[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store_f32(totals + r * UNIT + v * LANES, total[r][v]);
  finish(m, rows, totals, UNIT, out, first);
}

#define QUANTISED_CASE(n) \
  case n: quantised_block(n, four, m, a, out, first); break;

INLINE void quantised_rows(int64_t rows, const int four, const Matrix *m, const Activations *a,
                           float *out, int64_t first) {
  switch (rows) {
    QUANTISED_CASE(1) QUANTISED_CASE(2)
#if BLOCK_ROWS >= 3
    QUANTISED_CASE(3)
#endif
#if BLOCK_ROWS >= 4
    QUANTISED_CASE(4)
#endif
#if BLOCK_ROWS == 8
    QUANTISED_CASE(5) QUANTISED_CASE(6) QUANTISED_CASE(7) QUANTISED_CASE(8)
#endif
  }
}

static void q8_rows(int64_t rows, const Matrix *m, const Activations *a, float *out,
                    int64_t first) {
  quantised_rows(rows, 0, m, a, out, first);
}

static void q4_rows(int64_t rows, const Matrix *m, const Activations *a, float *out,
                    int64_t first) {
  quantised_rows(rows, 1, m, a, out, first);
}
#endif
