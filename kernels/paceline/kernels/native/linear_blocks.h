/* Linear layers with weights in 8 or 4 bits: exact integer sums in blocks of 32 inputs, scaled and
 * added in one chain over the blocks. */
#ifndef PACELINE_LINEAR_BLOCKS_H
#define PACELINE_LINEAR_BLOCKS_H

#include "dots.h"
#include "linear_units.h"

#define RANGES 8          /* ranges of rows in an item */
#define STRETCH_BLOCKS 16 /* blocks that stay in the first-level cache for all ranges */

#if LANES == 4
#define QUANTISED_ROWS 3
#elif defined(PAIRS_OF_BYTES)
#define QUANTISED_ROWS 4
#else
#define QUANTISED_ROWS 6 /* two vectors of outputs: sums in registers, totals in memory */
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

/* Constants of an inner loop. */
typedef struct {
  int four, f16, minima;
} QuantisedFormat;

/* Bytes of a panel, and of a block. */
INLINE int64_t format_panel(const QuantisedFormat f) {
  return QUANT_BLOCK * PANEL / (f.four ? 2 : 1);
}
INLINE int64_t format_bytes(const QuantisedFormat f) {
  return 2 * format_panel(f) + PAIR * (f.f16 ? 2 : 4) * (f.minima ? 2 : 1);
}

/* A panel of a block, one byte a value, in lines of 4 inputs. */
typedef struct {
  char values[QUANT_BLOCK * PANEL];
  float scale[PANEL], minimum[PANEL];
} UnpackedPanel;

/* Unpacks blocks, and subtracts `offset` from each value. */
INLINE void unpack_blocks(const QuantisedFormat f, int32_t offset, const char *block, int64_t count,
                          UnpackedPanel *out) {
  const int64_t panel = format_panel(f), factor = f.f16 ? 2 : 4, bytes = format_bytes(f);
  const ivec less = splat_i32((int32_t)((uint32_t)offset * 0x01010101u));
#pragma GCC unroll 1
  for (const char *end = block + count * bytes; block < end; block += bytes)
#pragma GCC unroll 1
    for (int side = 0; side < 2; side++, out++) {
      const char *values = block + side * panel;
      const char *scales = block + 2 * panel + side * PANEL * factor;
#pragma GCC unroll 8
      for (int64_t i = 0; i < panel; i += 4 * LANES) {
        const ivec w = load_i32(values + i);
        if (f.four) {
          char *to = out->values + i / 64 * 128 + i % 64;
          store_i32(to, subtract_bytes(low_halves(w), less));
          store_i32(to + 64, subtract_bytes(high_halves(w), less));
        } else {
          store_i32(out->values + i, subtract_bytes(w, less));
        }
      }
#pragma GCC unroll 4
      for (int64_t v = 0; v < PANEL; v += LANES) {
        store_f32(out->scale + v, load_factor(scales + v * factor, f.f16));
        if (f.minima) store_f32(out->minimum + v, load_factor(scales + (PAIR + v) * factor, f.f16));
      }
    }
}

/* Fetches weights that come after a block: far ahead into the second-level cache, then into the
 * first-level one. Not a loop: that takes longer than the rest of a block. */
INLINE void fetch_ahead(const char *block, const int64_t bytes) {
#pragma GCC unroll 40
  for (int64_t p = 0; p < bytes; p += 64) {
    __builtin_prefetch(block + BLOCKS_FAR_AHEAD + p, 0, 2);
    __builtin_prefetch(block + BLOCKS_AHEAD + p, 0, 3);
  }
}

/* Adds the products of a block to the sums of vectors begin .. end - 1 of outputs. */
INLINE void add_products(const int rows, const int four, const char *values, const int begin,
                         const int end, const Activations *a, ivec sum[QUANTISED_ROWS][VECTORS]) {
  const int64_t panel = QUANT_BLOCK * PANEL / (four ? 2 : 1);
#pragma GCC unroll 8
  for (int i = 0; i < QUANT_BLOCK; i += 4) {
    ivec w[VECTORS];
#pragma GCC unroll 4
    for (int v = begin; v < end; v++) {
      const char *at = values + (LANES == PANEL ? v * panel : v * LANES * 4);
      w[v] = load_i32(at + (four ? i / 8 * 64 : i / 4 * 64));
      if (four) w[v] = i % 8 ? high_halves(w[v]) : low_halves(w[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = begin; v < end; v++) sum[r][v] = dot(four, sum[r][v], w[v], a[r].values + i);
  }
}

/* Adds a block to the totals of `vectors` vectors of outputs, from `first` of PAIR on. With one row
 * panels are read one after the other, as they are in memory; otherwise vectors share a broadcast.
 */
INLINE void add_block(const int rows, const int vectors, const QuantisedFormat f, const char *block,
                      int64_t first, const Activations *a, vec total[QUANTISED_ROWS][VECTORS]) {
  const int64_t panel = format_panel(f), factor = f.f16 ? 2 : 4;
  const char *values = block + first / PANEL * panel;
  ivec sum[QUANTISED_ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[r][v] = begin_sum(f.four, a[r].factors.start);
  if (LANES == PANEL && rows == 1)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) add_products(rows, f.four, values, v, v + 1, a, sum);
  else
    add_products(rows, f.four, values, 0, vectors, a, sum);
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    const char *scales = block + 2 * panel + (first + v * LANES) * factor;
    const vec scale = load_factor(scales, f.f16), shift = scale * splat(-SHIFT);
    const vec minimum = f.minima ? load_factor(scales + PAIR * factor, f.f16) : scale;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      const vec x = scaled(end_sum(f.four, sum[r][v], a[r].factors.start), scale, shift, f.f16);
      total[r][v] = fma_(x, splat(a[r].factors.scale), total[r][v]);
      if (f.minima) total[r][v] = fma_(minimum, splat(a[r].factors.sum), total[r][v]);
    }
  }
}

/* Loads or stores the totals of some vectors from or to a table [rows][PAIR]. */
INLINE void load_totals(const int rows, const int vectors, const float *table,
                        vec total[QUANTISED_ROWS][VECTORS]) {
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) total[r][v] = load_f32(table + r * PAIR + v * LANES);
}

INLINE void store_totals(const int rows, const int vectors, float *table,
                         vec total[QUANTISED_ROWS][VECTORS]) {
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store_f32(table + r * PAIR + v * LANES, total[r][v]);
}

/* Adds `count` blocks to the totals [rows][PAIR] of a range of rows. */
INLINE void add_blocks(const int rows, const int alone, const QuantisedFormat f, const char *block,
                       int64_t count, const Activations *a, float *totals, Turn turn) {
  const int64_t bytes = format_bytes(f);
  int64_t wait = turn.number; /* blocks for which others fetch */
  vec total[PAIR / UNIT][QUANTISED_ROWS][VECTORS];
#pragma GCC unroll 2
  for (int u = 0; u < PAIR / UNIT; u++) load_totals(rows, VECTORS, totals + u * UNIT, total[u]);
#pragma GCC unroll 1
  for (int64_t b = 0; b < count; b++, block += bytes, a += rows) {
    if (alone || !wait--) {
      fetch_ahead(block, bytes);
      wait = turn.count - 1;
    }
#pragma GCC unroll 1
    for (int u = 0; u < PAIR / UNIT; u++) /* outputs whose sums fit the registers */
      add_block(rows, VECTORS, f, block, u * UNIT, a, total[u]);
  }
#pragma GCC unroll 2
  for (int u = 0; u < PAIR / UNIT; u++) store_totals(rows, VECTORS, totals + u * UNIT, total[u]);
}

#define QUANTISED_CASE(n)                                 \
  case n:                                                 \
    if (turn.count == 1)                                  \
      add_blocks(n, 1, f, block, count, a, totals, turn); \
    else                                                  \
      add_blocks(n, 0, f, block, count, a, totals, turn); \
    break;

INLINE void quantised_rows(int64_t rows, const QuantisedFormat f, const char *block, int64_t count,
                           const Activations *a, float *totals, Turn turn) {
  switch (rows) { CASES_TO(QUANTISED_ROWS, QUANTISED_CASE) }
}

/* The functions of one format of weights: `four`: 4 bits, not 8; `f16`: scales and minima are
 * float16, not float32; `minima`: there are minima. All three are literals: each function is
 * compiled without the branches of other formats. */
typedef struct {
  void (*unpack)(int32_t offset, const char *block, int64_t count, UnpackedPanel *out);
  void (*add)(int64_t rows, const char *block, int64_t count, const Activations *a, float *totals,
              Turn turn);
} FormatKernels;

#define FORMAT_KERNELS(name, four, f16, minima)                                                \
  static void unpack_##name(int32_t offset, const char *block, int64_t count,                  \
                            UnpackedPanel *out) {                                              \
    unpack_blocks((QuantisedFormat){four, f16, minima}, offset, block, count, out);            \
  }                                                                                            \
  static void add_##name(int64_t rows, const char *block, int64_t count, const Activations *a, \
                         float *totals, Turn turn) {                                           \
    quantised_rows(rows, (QuantisedFormat){four, f16, minima}, block, count, a, totals, turn); \
  }                                                                                            \
  static const FormatKernels name = {unpack_##name, add_##name};
FORMAT_KERNELS(q8_f32, 0, 0, 0)
FORMAT_KERNELS(q8_f32_minima, 0, 0, 1)
FORMAT_KERNELS(q8_f16, 0, 1, 0)
FORMAT_KERNELS(q8_f16_minima, 0, 1, 1)
FORMAT_KERNELS(q4_f32, 1, 0, 0)
FORMAT_KERNELS(q4_f32_minima, 1, 0, 1)
FORMAT_KERNELS(q4_f16, 1, 1, 0)
FORMAT_KERNELS(q4_f16_minima, 1, 1, 1)

INLINE const FormatKernels *format_kernels(const Matrix *m) {
  /* By number of bits, type of the factors, and minima. */
  static const FormatKernels *const kernels[2][2][2] = {
      {{&q8_f32, &q8_f32_minima}, {&q8_f16, &q8_f16_minima}},
      {{&q4_f32, &q4_f32_minima}, {&q4_f16, &q4_f16_minima}}};
  return kernels[m->format == LINEAR_Q4][m->scales_f16][m->minima];
}
#endif
