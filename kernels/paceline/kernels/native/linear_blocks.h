/* Linear layers with weights in 8 or 4 bits: exact integer sums in blocks of 32 inputs, scaled and
 * added in one chain over the blocks. */
#ifndef PACELINE_LINEAR_BLOCKS_H
#define PACELINE_LINEAR_BLOCKS_H

#include "dots.h"
#include "linear_units.h"

#if LANES == 4
#define QUANTISED_ROWS 3
#elif LANES == 8 && defined(PAIRS_OF_BYTES)
#define QUANTISED_ROWS 4
#else
#define QUANTISED_ROWS \
  6 /* two vectors of outputs: sums in registers, at 256 bits totals in memory */
#endif

/* What a row's activations in one block of inputs contribute beside their values. */
typedef struct {
  float scale, sum; /* sum: scale times the sum of the values */
  int32_t start;    /* of the integer sum: SHIFT less what the offset of the weights takes away */
  int32_t unused;   /* keeps the size a multiple of 16 */
} Factors;

typedef struct {
  char values[QUANT_BLOCK];
  Factors factors;
} Activations;

/* Quantises a block of a row, see linear.h. */
INLINE Factors quantise(const float *x, int64_t offset, int32_t value[QUANT_BLOCK]) {
  ivec largest = splat_i32(0), sum = splat_i32(0);
  float m, scale = 0.0f, inverse = 0.0f;
#pragma GCC unroll 8
  for (int i = 0; i < QUANT_BLOCK; i += LANES)
    largest = max_i32(largest, clear_sign(load_f32(x + i)));
  const int32_t bits = largest_lane(largest); /* magnitudes are ordered as whole numbers */
  memcpy(&m, &bits, sizeof m);
  if (bits >= 0x7f800000) { /* infinite or NaN */
    scale = NAN;
  } else if (m >= 0x1p-100f) {
    scale = m / 127.0f;
    inverse = 1.0f / scale;
  }
  if (inverse == 0.0f) {
    memset(value, 0, QUANT_BLOCK * sizeof *value);
    return (Factors){scale, scale * 0.0f, SHIFT_BITS, 0};
  }
#pragma GCC unroll 8
  for (int i = 0; i < QUANT_BLOCK;
       i += LANES) { /* the addition rounds to a whole number, ties to even */
    const vec rounded = load_f32(x + i) * splat(inverse) + splat(SHIFT);
    const ivec whole = add_i32(as_int(rounded), splat_i32(-SHIFT_BITS));
    store_i32(value + i, whole);
    sum = add_i32(sum, whole);
  }
  const int32_t total = add_lanes(sum);
  return (Factors){scale, scale * (float)total, SHIFT_BITS - (int32_t)offset * total, 0};
}

/* Row `row` of x. Within a range of rows, activations are in the order [ins / 32][rows]. */
static void quantise_row(const Matrix *m, const float *x, int64_t rows, Activations *out,
                         int64_t row) {
  const RowRange in = row_range(rows, QUANTISED_ROWS, row);
  const int64_t blocks = m->ins / QUANT_BLOCK;
  const int64_t offset = m->offset - dot_offset(m->format == LINEAR_Q4);
  out += in.first * blocks + (row - in.first);
  for (int64_t b = 0; b < blocks; b++, out += in.count) {
    int32_t value[QUANT_BLOCK];
    out->factors = quantise(x + row * m->ins + b * QUANT_BLOCK, offset, value);
    for (int i = 0; i < QUANT_BLOCK; i++) out->values[i] = (char)value[i];
  }
}

INLINE vec load_factor(const char *p, int f16) {
  return f16 ? load_f16((const uint16_t *)p) : load_f32((const float *)p);
}

/* Sums of a block, with SHIFT, times the scales of the weights: one rounding. SHIFT makes a whole
 * number the low bits of a float. Its product with a float16 scale is exact. */
INLINE vec scaled(ivec sum, vec scale, vec shift, int f16) {
  if (f16) return fma_(as_float(sum), scale, shift);
  return fma_(to_float(add_i32(sum, splat_i32(-SHIFT_BITS))), scale, splat(0.0f));
}

/* Constants of an inner loop. `alone`: no other range of rows reads the same weights. */
typedef struct {
  int four, f16, minima, alone;
} QuantisedFormat;

/* Adds the products of a block to the sums of vectors begin .. end - 1 of outputs. */
INLINE void add_products(const int rows, const int four, const char *values, int64_t panel,
                         const int begin, const int end, const Activations *a,
                         ivec sum[QUANTISED_ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int i = 0; i < QUANT_BLOCK; i += 4) {
    ivec w[VECTORS];
#pragma GCC unroll 4
    for (int v = begin; v < end; v++) {
      const char *at = values + (v - begin) * (LANES == PANEL ? panel : LANES * 4);
      w[v] = load_i32(at + (four ? i / 8 * 64 : i / 4 * 64));
      if (four) w[v] = i % 8 ? high_halves(w[v]) : low_halves(w[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = begin; v < end; v++) sum[r][v] = dot(four, sum[r][v], w[v], a[r].values + i);
  }
}

/* Fetches weights that come after those of a block. */
INLINE void fetch_blocks(const QuantisedFormat f, const char *block, int64_t bytes,
                         const char *next, Turn turn) {
  if (f.alone) {
#pragma GCC unroll 32
    for (int64_t p = 0; p < bytes; p += 64) __builtin_prefetch(block + BLOCKS_AHEAD + p, 0, 3);
  } else {
#pragma GCC unroll 1
    for (int64_t p = turn.number * 64; p < bytes; p += turn.count * 64)
      __builtin_prefetch(next + p, 0, 2);
  }
}

/* PAIR outputs, from `first` on, of `rows` rows. With one row the panels of a block are read one
 * after the other, as they are in memory; otherwise vectors share a broadcast. */
INLINE void quantised_pair(const int rows, const QuantisedFormat f, const Matrix *m,
                           const Activations *a, float *out, int64_t first, Turn turn) {
  const int four = f.four, factor = f.f16 ? 2 : 4;
  const int64_t panel = QUANT_BLOCK * PANEL / (four ? 2 : 1);
  const int64_t bytes = 2 * panel + PAIR * factor * (f.minima ? 2 : 1),
                blocks = m->ins / QUANT_BLOCK;
  const char *block = first_block(m, first);
  vec total[PAIR / UNIT][QUANTISED_ROWS][VECTORS];
  float totals[QUANTISED_ROWS * PAIR];
#pragma GCC unroll 1
  for (int u = 0; u < PAIR / UNIT; u++)
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) total[u][r][v] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t b = 0; b < blocks; b++, a += rows, block += bytes) {
    fetch_blocks(f, block, bytes, block + blocks * bytes, turn);
#pragma GCC unroll 1
    for (int u = 0; u < PAIR / UNIT; u++) { /* outputs whose sums fit the registers */
      const char *scales = block + 2 * panel + u * UNIT * factor, *minima = scales + PAIR * factor;
      ivec sum[QUANTISED_ROWS][VECTORS];
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = begin_sum(four, a[r].factors.start);
      const char *values = block + (LANES == PANEL ? 0 : u * panel);
      if (LANES == PANEL && rows == 1)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
          add_products(rows, four, values + v * panel, panel, v, v + 1, a, sum);
      else
        add_products(rows, four, values, panel, 0, VECTORS, a, sum);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        const vec scale = load_factor(scales + v * LANES * factor, f.f16);
        const vec minimum = f.minima ? load_factor(minima + v * LANES * factor, f.f16) : scale;
        const vec shift = scale * splat(-SHIFT);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
          const vec x = scaled(end_sum(four, sum[r][v], a[r].factors.start), scale, shift, f.f16);
          total[u][r][v] = fma_(x, splat(a[r].factors.scale), total[u][r][v]);
          if (f.minima) total[u][r][v] = fma_(minimum, splat(a[r].factors.sum), total[u][r][v]);
        }
      }
    }
  }
#pragma GCC unroll 1
  for (int u = 0; u < PAIR / UNIT; u++)
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        store_f32(totals + r * PAIR + u * UNIT + v * LANES, total[u][r][v]);
  finish(m, rows, totals, PAIR, out, first);
}

/* The kernel for a range of `n` rows, 1 to QUANTISED_ROWS. As a case with a literal number, its
 * loops over rows are unrolled and its sums stay in registers; with a variable number they would be
 * in memory. */
#define QUANTISED_CASE(n) \
  case n: quantised_pair(n, f, m, a, out, first, turn); break;

INLINE void quantised_rows(int64_t rows, const QuantisedFormat f, const Matrix *m,
                           const Activations *a, float *out, int64_t first, Turn turn) {
  switch (rows) {
    QUANTISED_CASE(1)
    QUANTISED_CASE(2)
    QUANTISED_CASE(3)
#if QUANTISED_ROWS >= 4
    QUANTISED_CASE(4)
#endif
#if QUANTISED_ROWS >= 6
    QUANTISED_CASE(5)
    QUANTISED_CASE(6)
#endif
  }
}

/* Defines `name`, the product of a range of rows with one format of weights: `four`: 4 bits, not 8;
 * `f16`: scales and minima are float16, not float32; `minima`: there are minima; `alone`: see
 * QuantisedFormat. All four are literals: each function is compiled without the branches of other
 * formats. FORMAT_KERNELS defines `name` for one of several ranges, and alone_`name`. */
#define FORMAT_ROWS(name, four, f16, minima, alone)                                                \
  static void name(int64_t rows, const Matrix *m, const Activations *a, float *out, int64_t first, \
                   Turn turn) {                                                                    \
    quantised_rows(rows, (QuantisedFormat){four, f16, minima, alone}, m, a, out, first, turn);     \
  }
#define FORMAT_KERNELS(name, four, f16, minima) \
  FORMAT_ROWS(name, four, f16, minima, 0) FORMAT_ROWS(alone_##name, four, f16, minima, 1)
FORMAT_KERNELS(q8_rows, 0, 1, 0)
FORMAT_KERNELS(q8_f32_rows, 0, 0, 0)
FORMAT_KERNELS(q8_minima_rows, 0, 1, 1)
FORMAT_KERNELS(q8_f32_minima_rows, 0, 0, 1)
FORMAT_KERNELS(q4_rows, 1, 1, 0)
FORMAT_KERNELS(q4_f32_rows, 1, 0, 0)
FORMAT_KERNELS(q4_minima_rows, 1, 1, 1)
FORMAT_KERNELS(q4_f32_minima_rows, 1, 0, 1)

typedef void (*QuantisedRows)(int64_t, const Matrix *, const Activations *, float *, int64_t, Turn);

/* The kernel for a range of rows, alone or not. */
INLINE QuantisedRows quantised_kernel(const Matrix *m, int alone) {
  /* By number of bits, type of the factors, minima, and whether the range is alone. */
  static const QuantisedRows kernels[2][2][2][2] = {
      {{{q8_f32_rows, alone_q8_f32_rows}, {q8_f32_minima_rows, alone_q8_f32_minima_rows}},
       {{q8_rows, alone_q8_rows}, {q8_minima_rows, alone_q8_minima_rows}}},
      {{{q4_f32_rows, alone_q4_f32_rows}, {q4_f32_minima_rows, alone_q4_f32_minima_rows}},
       {{q4_rows, alone_q4_rows}, {q4_minima_rows, alone_q4_minima_rows}}}};
  return kernels[m->format == LINEAR_Q4][m->scales_f16][m->minima][alone];
}
#endif
