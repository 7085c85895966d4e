/* Linear layers in 8-bit integers over rotated inputs: one scale an output and one a row, so that a
 * sum of products goes through all inputs without a scale. See linear.h for the format. */
#ifndef PACELINE_LINEAR_ROTATED_H
#define PACELINE_LINEAR_ROTATED_H

#include "dots.h"
#include "linear_blocks.h"
#include "tiles.h"

#if LANES == 16 && !defined(PAIRS_OF_BYTES)
#define ROTATED_ROWS 12 /* with two vectors of outputs their sums fill 32 registers */
#elif LANES == 16
#define ROTATED_ROWS 10
#elif LANES == 8 && !defined(PAIRS_OF_BYTES)
#define ROTATED_ROWS 6
#elif LANES == 8
#define ROTATED_ROWS 4
#else
#define ROTATED_ROWS 3
#endif
#if LANES == 16
#define MOST_VECTORS 2 /* of outputs, in a pass over the weights of an item */
#else
#define MOST_VECTORS 4
#endif

#define WHOLE 64 /* inputs that values of rows and weights are rounded up to: those of a tile */
#define STEP (4 * PAIR)  /* bytes of weights for 4 inputs */
#define STRETCH 192      /* most steps of weights that stay in the first-level cache for all rows */
#define INTEGER_TILES 32 /* rows of a block in tiles */

#ifdef __AMX_INT8__
#define VECTOR_ROWS 8 /* products of more rows are in tiles */
#define SPARE_ROWS INTEGER_TILES
#else
#define VECTOR_ROWS INT64_MAX
#define SPARE_ROWS 0
#endif

/* What a row has beside its values: the factor on its sums, and what is added to them. */
typedef struct {
  float scale;
  int32_t start;
} RowFactors;

INLINE int64_t rotated_ins(const Matrix *m) { return divide_up(m->ins, WHOLE) * WHOLE; }

/* Bytes of the weights of PAIR outputs, with their scales. */
INLINE int64_t rotated_bytes(const Matrix *m) {
  return rotated_ins(m) * PAIR + PAIR * (int64_t)sizeof(float);
}

INLINE int in_integer_tiles(int64_t rows) { return rows > VECTOR_ROWS; }

/* Bytes from a row's values to the next one's. Powers of two would share few lines of a cache. */
INLINE int64_t rotated_stride(const Matrix *m) { return rotated_ins(m) + 64; }

INLINE int64_t rotated_factors(int64_t rows) {
  return divide_up(rows * (int64_t)sizeof(RowFactors), 64) * 64;
}

/* Bytes of prepared activations: factors, then values [rows][stride]; tiles reach beyond them. */
static int64_t rotated_scratch(const Matrix *m, int64_t rows) {
  return rotated_factors(rows) + (rows + SPARE_ROWS) * rotated_stride(m);
}

/* Lanes i and i + step become their sum and difference. */
INLINE vec turn_lanes(vec x, const int step) {
#if LANES == 16
  const vec other = step == 1   ? _mm512_permute_ps(x, 0xb1)
                    : step == 2 ? _mm512_permute_ps(x, 0x4e)
                    : step == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1)
                                : _mm512_shuffle_f32x4(x, x, 0x4e);
  const __mmask16 high = step == 1 ? 0xaaaa : step == 2 ? 0xcccc : step == 4 ? 0xf0f0 : 0xff00;
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), high, other, x);
#elif LANES == 8
  const vec other = step == 1   ? _mm256_permute_ps(x, 0xb1)
                    : step == 2 ? _mm256_permute_ps(x, 0x4e)
                                : _mm256_permute2f128_ps(x, x, 0x01);
  const vec sum = _mm256_add_ps(x, other), difference = _mm256_sub_ps(other, x);
  return step == 1   ? _mm256_blend_ps(sum, difference, 0xaa)
         : step == 2 ? _mm256_blend_ps(sum, difference, 0xcc)
                     : _mm256_blend_ps(sum, difference, 0xf0);
#else
  if (step == 1) return (vec){x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]};
  return (vec){x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]};
#endif
}

/* The stages of 64 numbers, in registers. */
INLINE void turn_64(vec x[64 / LANES], const int64_t size) {
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2)
    if (step < size)
#pragma GCC unroll 16
      for (int v = 0; v < 64 / LANES; v++) x[v] = turn_lanes(x[v], step);
#pragma GCC unroll 4
  for (int step = 1; step < 64 / LANES; step *= 2)
    if (step * LANES < size)
#pragma GCC unroll 16
      for (int v = 0; v < 64 / LANES; v++)
        if (!(v & step)) {
          const vec low = x[v], high = x[v + step];
          x[v] = low + high, x[v + step] = low - high;
        }
}

INLINE ivec larger(ivec largest, vec x) { return max_i32(largest, clear_sign(x)); }

/* The stages behind those of 64 numbers, of blocks of `parts` times 64. */
INLINE ivec turn_parts(float *x, int64_t ins, const int parts) {
  ivec largest = splat_i32(0);
  for (int64_t block = 0; block < ins; block += parts * 64)
    for (int64_t i = block; i < block + 64; i += LANES) {
      vec part[MAX_ROTATION / 64];
#pragma GCC unroll 8
      for (int n = 0; n < parts; n++) part[n] = load_f32(x + i + n * 64);
#pragma GCC unroll 3
      for (int step = 1; step < parts; step *= 2)
#pragma GCC unroll 8
        for (int n = 0; n < parts; n++)
          if (!(n & step)) {
            const vec low = part[n], high = part[n + step];
            part[n] = low + high, part[n + step] = low - high;
          }
#pragma GCC unroll 8
      for (int n = 0; n < parts; n++) {
        store_f32(x + i + n * 64, part[n]);
        largest = larger(largest, part[n]);
      }
    }
  return largest;
}

/* Rotates blocks of up to 32 numbers; zeros are behind `ins`. */
static __attribute__((noinline)) ivec rotate_small(const float *x, int64_t ins, int64_t size,
                                                   float *out) {
  ivec largest = splat_i32(0);
  for (int64_t i = 0; i < ins; i += 64) {
    vec part[64 / LANES];
    for (int v = 0; v < 64 / LANES; v++) {
      const int64_t at = i + v * LANES;
      part[v] = at < ins ? load_part(x + at, ins - at) : splat(0.0f);
    }
    turn_64(part, size);
    for (int v = 0; v < 64 / LANES; v++) {
      store_f32(out + i + v * LANES, part[v]);
      largest = larger(largest, part[v]);
    }
  }
  return largest;
}

/* Rotates `ins` numbers in blocks of `size`; `out` has room for a multiple of 64. Returns the bits
 * of the largest magnitude, which are ordered as whole numbers. */
static int32_t rotate_inputs(const float *x, int64_t ins, int64_t size, float *out) {
  ivec largest = splat_i32(0);
  if (size < 64) return largest_lane(rotate_small(x, ins, size, out));
  for (int64_t i = 0; i < ins; i += 64) {
    vec part[64 / LANES];
#pragma GCC unroll 16
    for (int v = 0; v < 64 / LANES; v++) part[v] = load_f32(x + i + v * LANES);
    turn_64(part, 64);
#pragma GCC unroll 16
    for (int v = 0; v < 64 / LANES; v++) {
      store_f32(out + i + v * LANES, part[v]);
      largest = larger(largest, part[v]);
    }
  }
  if (size == 128) largest = turn_parts(out, ins, 2);
  if (size == 256) largest = turn_parts(out, ins, 4);
  if (size == 512) largest = turn_parts(out, ins, 8);
  return largest_lane(largest);
}

/* Rotates and quantises a row of `ins` numbers: values [ins rounded up to 64], zeros behind ins.
 * Returns the scale, and the sum of all values in `total`. */
static float quantise_rotated(const float *x, int64_t ins, int64_t size, char *values,
                              int32_t *total) {
  const int64_t padded = divide_up(ins, 64) * 64;
  _Alignas(64) float turned[padded];
  float largest;
  const int32_t bits = rotate_inputs(x, ins, size, turned);
  ivec sum = splat_i32(0);
  *total = 0;
  if (bits >= 0x7f800000) { /* infinite or NaN */
    memset(values, 0, (size_t)padded);
    return NAN;
  }
  memcpy(&largest, &bits, sizeof largest);
  if (largest < 0x1p-100f) largest = 0x1p-100f;
  const vec inverse = splat(127.0f / largest);
  for (int64_t i = 0; i < padded; i += LANES) {
    const vec scaled = load_f32(turned + i) * inverse;
    const ivec whole = as_int(scaled + splat(SHIFT)); /* rounds; its low byte is the value */
    sum = add_i32(sum, add_i32(whole, splat_i32(-SHIFT_BITS)));
    store_bytes(values + i, whole);
  }
  *total = add_lanes(sum);
  return largest / 127.0f;
}

static void prepare_rotated_row(const Matrix *m, const float *x, int64_t rows, char *scratch,
                                int64_t row) {
  RowFactors *factors = (RowFactors *)scratch + row;
  char *values = scratch + rotated_factors(rows) + row * rotated_stride(m);
  int32_t total;
  factors->scale = quantise_rotated(x + row * m->ins, m->ins, m->rotation, values, &total);
  factors->start = (dot_offset(0) - 128) * total;
}

/* A stretch of weights for a range of rows. Weights are fetched into the second-level cache: by a
 * range that is alone a fixed distance ahead. Several ranges divide what comes next among them:
 * `fetch` is the range's part, which it reads at `spacing` bytes, four times in two steps. Without
 * branches a line is fetched twice by some; that costs nothing. */
typedef struct {
  const char *weights, *fetch;
  int64_t steps, spacing; /* `steps` is even */
  int fresh;              /* the first one */
} RotatedStretch;

/* Adds the products of a stretch to `sums` [rows][PAIR]. `alone`: no other range of rows reads the
 * same weights. */
INLINE void rotated_sums(const int rows, const int vectors, const int alone, const RotatedStretch s,
                         const char *x, int64_t stride, int32_t *sums) {
  const int passes = PAIR / (vectors * LANES);
  const int64_t spacing = s.spacing / passes;
  const char *fetch = s.fetch;
#pragma GCC unroll 1
  for (int first = 0; first < PAIR; first += vectors * LANES) {
    ivec sum[ROTATED_ROWS][MOST_VECTORS];
    const char *w = s.weights + first * 4, *a = x;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[r][v] = splat_i32(0);
    if (!s.fresh)
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = load_i32(sums + r * PAIR + first + v * LANES);
#pragma GCC unroll 1
    for (int64_t i = 0; i < s.steps; i += 2, w += 2 * STEP, a += 8) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; line++)
        if (alone)
          __builtin_prefetch(w + WEIGHTS_FAR_AHEAD + line * 64, 0, 2);
        else
          __builtin_prefetch(fetch, 0, 2), fetch += spacing;
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        ivec value[MOST_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) value[v] = load_i32(w + odd * STEP + v * LANES * 4);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
          for (int v = 0; v < vectors; v++)
            sum[r][v] = dot(0, sum[r][v], value[v], a + r * stride + odd * 4);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) store_i32(sums + r * PAIR + first + v * LANES, sum[r][v]);
  }
}

#define ROTATED_CASE(n)                                           \
  case n:                                                         \
    if (alone)                                                    \
      rotated_sums(n, ROTATED_VECTORS(n), 1, s, x, stride, sums); \
    else                                                          \
      rotated_sums(n, ROTATED_VECTORS(n), 0, s, x, stride, sums); \
    break;
#define ROTATED_VECTORS(n) ((n) * MOST_VECTORS <= 8 ? MOST_VECTORS : VECTORS)

static void add_rotated(int64_t rows, int alone, const RotatedStretch s, const char *x,
                        int64_t stride, int32_t *sums) {
  switch (rows) { CASES_TO(ROTATED_ROWS, ROTATED_CASE) }
}

/* Scales sums [rows][PAIR], adds the bias, and stores them; `out` is the first row. */
static void finish_rotated(const Matrix *m, int64_t rows, const RowFactors *factors,
                           const float *scales, const int32_t *sums, float *out, int64_t first) {
  for (int64_t v = 0; v < PAIR && first + v < m->outs; v += LANES) {
    const int64_t at = first + v, left = m->outs - at;
    const vec scale = load_f32(scales + v);
    const vec bias = m->bias ? load_part(m->bias + at, left) : splat(0.0f);
    for (int64_t r = 0; r < rows; r++) {
      const ivec sum = add_i32(load_i32(sums + r * PAIR + v), splat_i32(factors[r].start));
      vec total = to_float(sum) * splat(factors[r].scale) * scale;
      if (m->bias) total = total + bias;
      if (left >= LANES)
        store_f32(out + r * m->outs + at, total);
      else
        store_part(out + r * m->outs, at, left, 0, total);
    }
  }
}

#ifdef __AMX_INT8__
/* PAIR sums of up to INTEGER_TILES rows: the weights are B tiles as they lie. */
static void rotated_tiles(int64_t rows, const char *w, const char *x, int64_t stride, int64_t ins,
                          int fetches, int32_t *sums) {
  const int second = rows > SIDE;
  ZERO_SUMS;
  for (int64_t i = 0; i < ins; i += WHOLE, w += WHOLE * PAIR, x += WHOLE) {
    for (int line = 0; fetches && line < WHOLE * PAIR; line += 64)
      __builtin_prefetch(w + WEIGHTS_FAR_AHEAD + line, 0, 2);
    ADD_PRODUCTS(TILE_DOT_SIGNED, x, stride, second, w, w + 64, STEP);
  }
  STORE_SUMS(sums, PAIR);
}
#endif

/* Rows of a block at most. */
INLINE int64_t rotated_rows(int64_t rows) {
  return in_integer_tiles(rows) ? INTEGER_TILES : ROTATED_ROWS;
}

/* PAIR outputs, from `first` on, of rows start .. stop - 1, which are at most RANGES ranges. The
 * weights are fetched once for all of them. */
static void rotated_item(const Matrix *m, const char *scratch, int64_t rows, int64_t start,
                         int64_t stop, float *out, int64_t first) {
  const int64_t limit = rotated_rows(rows), ins = rotated_ins(m), stride = rotated_stride(m);
  const RowFactors *factors = (const RowFactors *)scratch;
  const char *x = scratch + rotated_factors(rows);
  const char *weights = (const char *)m->values + first / PAIR * rotated_bytes(m);
  const float *scales = (const float *)(weights + ins * PAIR);
  const int64_t size = range_rows(rows, limit);
#ifdef __AMX_INT8__
  if (in_integer_tiles(rows)) {
    _Alignas(64) int32_t sums[INTEGER_TILES * PAIR];
    configure_tiles(64);
    for (int64_t r = start; r < stop; r += size) {
      const int64_t count = r + size < stop ? size : stop - r;
      rotated_tiles(count, weights, x + r * stride, stride, ins, r == start, sums);
      finish_rotated(m, count, factors + r, scales, sums, out + r * m->outs, first);
    }
    return;
  }
#endif
  _Alignas(64) int32_t sums[RANGES * ROTATED_ROWS * PAIR];
  const int64_t steps = ins / 4, stretch = divide_up(steps / 2, divide_up(steps, STRETCH)) * 2;
  const int ranges = (int)divide_up(stop - start, size);
  for (int64_t step = 0; step < steps; step += stretch)
    for (int64_t r = start, number = 0; r < stop; r += size, number++) {
      const int64_t count = r + size < stop ? size : stop - r;
      RotatedStretch s = {.weights = weights + step * STEP, .fresh = !step, .spacing = 64 / ranges};
      s.steps = steps - step < stretch ? steps - step : stretch;
      s.fetch = s.weights + s.steps * STEP + s.steps * 2 * s.spacing * number;
      add_rotated(count, ranges == 1, s, x + r * stride + step * 4, stride,
                  sums + (r - start) * PAIR);
    }
  finish_rotated(m, stop - start, factors + start, scales, sums, out + start * m->outs, first);
}
#endif
