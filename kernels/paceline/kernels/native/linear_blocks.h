/* Linear layers with weights in 8 or 4 bits: exact integer sums in blocks of 32 inputs, scaled and
 * added in one chain over the blocks. */
#ifndef PACELINE_LINEAR_BLOCKS_H
#define PACELINE_LINEAR_BLOCKS_H

#include "dots.h"
#include "linear_units.h"

#define BLOCK_INS 32
#if LANES == 16
#define BLOCK_ROWS 6 /* integer and float sums of two vectors fill 32 registers */
#elif LANES == 8
#define BLOCK_ROWS 2
#else
#define BLOCK_ROWS 3
#endif

/* The activations of a row in one block of inputs. */
typedef struct {
  activation values[BLOCK_INS];
  float scale, sum; /* sum: scale times the sum of the values */
  int32_t start;    /* of the integer sum: what the offset of the weights takes away */
  int32_t unused;   /* keeps the size a multiple of 16 */
} Activations;

/* One block of a row: see linear.h. */
INLINE void quantise(const float *x, int64_t offset, Activations *out) {
  uint32_t bits[BLOCK_INS], largest = 0;
  int32_t value[BLOCK_INS], sum = 0;
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
    const float rounded = x[i] * inverse + 12582912.0f;
    int32_t whole;
    memcpy(&whole, &rounded, sizeof whole);
    value[i] = inverse == 0.0f ? 0 : whole - 0x4b400000;
    sum += value[i];
  }
  for (int i = 0; i < BLOCK_INS; i++) {
#ifdef SPLIT_ACTIVATIONS
    const int at = (i & ~3) + 2 * (i & 1) + (i >> 1 & 1);
#else
    const int at = i;
#endif
    out->values[at] = (activation)value[i];
  }
  out->scale = scale;
  out->sum = scale * (float)sum;
  out->start = (int32_t)(DOT_OFFSET - offset) * sum;
  out->unused = 0;
}

/* Row `row` of x. Within a block of rows, activations are in the order [ins / 32][rows]. */
static void quantise_row(const Matrix *m, const float *x, int64_t rows, int64_t most, void *scratch,
                         int64_t row) {
  const int64_t size = block_rows(rows, most), first = row / size * size;
  const int64_t count = first + size < rows ? size : rows - first, blocks = m->ins / BLOCK_INS;
  Activations *out = (Activations *)scratch + first * blocks + (row - first);
  for (int64_t b = 0; b < blocks; b++)
    quantise(x + row * m->ins + b * BLOCK_INS, m->offset, out + b * count);
}

INLINE vec load_scale(const char *p, int64_t block, int f16) {
  return f16 ? load_f16((const uint16_t *)p + block * PANEL) : load_f32((const float *)p + block * PANEL);
}

/* UNIT outputs, from `first` on, of `rows` rows. */
INLINE void quantised_block(const int rows, const int four, const Matrix *m, const Activations *a,
                            float *out, int64_t first) {
  const int64_t blocks = m->ins / BLOCK_INS, panel = m->ins * PANEL / (four ? 2 : 1);
  const int f16 = (int)m->scales_f16, factor = f16 ? 2 : 4;
  const char *weights[VECTORS], *scales[VECTORS], *minima[VECTORS];
  vec total[BLOCK_ROWS][VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    const int64_t at = first + v * LANES, factors = blocks * PANEL * factor;
    weights[v] = place(m->values, panel, 64, at);
    scales[v] = place(m->scales, factors, PANEL * factor, at);
    minima[v] = m->minima ? place(m->minima, factors, PANEL * factor, at) : 0;
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) total[r][v] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t b = 0; b < blocks; b++, a += rows) {
    ivec sum[BLOCK_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[r][v] = splat_i32(a[r].start);
#pragma GCC unroll 1
    for (int i = 0; i < BLOCK_INS; i += 8) {
      ivec low[VECTORS], high[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        const ivec line = load_i32(weights[v]);
        low[v] = four ? low_halves(line) : line;
        high[v] = four ? high_halves(line) : load_i32(weights[v] + 64);
        weights[v] += four ? 64 : 128;
      }
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          sum[r][v] = dot(sum[r][v], low[v], a[r].values + i);
          sum[r][v] = dot(sum[r][v], high[v], a[r].values + i + 4);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const vec scale = load_scale(scales[v], b, f16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++)
        total[r][v] = fma_(to_float(sum[r][v]), scale * splat(a[r].scale), total[r][v]);
    }
    if (m->minima)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        const vec minimum = load_scale(minima[v], b, f16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
          total[r][v] = fma_(minimum, splat(a[r].sum), total[r][v]);
      }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) finish_row(m, total[r], out + r * m->outs, first);
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
#if BLOCK_ROWS == 6
    QUANTISED_CASE(4) QUANTISED_CASE(5) QUANTISED_CASE(6)
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
