/* Linear layers in tiles: blocks of up to 32 rows times two panels, whose lines are B tiles as they
 * lie. Rows of A tiles beyond the last row are whatever memory holds: their sums are dropped.
 *
 * bfloat16: activations are rounded to bfloat16; the order of the sums is the processor's, the same
 * for every row. 8 and 4 bit: the bits of linear.h. */
#ifndef PACELINE_LINEAR_TILES_H
#define PACELINE_LINEAR_TILES_H

#include "linear_blocks.h"
#include "tiles.h"

#define TILE_ROWS (2 * SIDE)
#define TILE_BYTES 1024

/* C tiles 0 to 3 = or += rows (A tiles 4 and 5) times panels (B tiles 6 and 7). The second A tile
 * only where there are more than SIDE rows. */
#define TILE_PRODUCTS(DOT, second, a, stride)     \
  TILE_LOAD(4, a, stride);                        \
  DOT(0, 4, 6);                                   \
  DOT(1, 4, 7);                                   \
  if (second) {                                   \
    TILE_LOAD(5, (a) + SIDE * (stride), stride);  \
    DOT(2, 5, 6);                                 \
    DOT(3, 5, 7);                                 \
  }
#define TILE_CLEAR() \
  TILE_ZERO(0);      \
  TILE_ZERO(1);      \
  TILE_ZERO(2);      \
  TILE_ZERO(3)

/* C tiles as rows of PAIR numbers. */
#define TILE_SUMS(to)                              \
  TILE_STORE(0, (to), PAIR * 4);                   \
  TILE_STORE(1, (to) + SIDE, PAIR * 4);            \
  TILE_STORE(2, (to) + SIDE * PAIR, PAIR * 4);     \
  TILE_STORE(3, (to) + SIDE * PAIR + SIDE, PAIR * 4)

/* Bytes of prepared activations, for A tiles that reach beyond the last row too. */
static int64_t tile_scratch(const Matrix *m, int64_t rows) {
  if (m->format == LINEAR_BF16) return (rows + TILE_ROWS) * padded_ins(m) * 2;
  return rows * (m->ins / BLOCK_INS) * (64 + (int64_t)sizeof(Factors)) + TILE_ROWS * 64;
}

/* Row `row` of x. bfloat16: [rows][ins rounded up to 32]. Else, within a block of rows, values are
 * in the order [ins / 32][rows][64]: an even block in the first 32 bytes, an odd one in the last, the
 * others 0, so that a B tile serves two blocks. After all values, factors [ins / 32][rows]. */
static void prepare_tile_row(const Matrix *m, const float *x, int64_t rows, char *scratch,
                             int64_t row) {
  const RowBlock in = row_block(rows, TILE_ROWS, row);
  const int64_t blocks = m->ins / BLOCK_INS, at = in.first * blocks + (row - in.first);
  x += row * m->ins;
  if (m->format == LINEAR_BF16) {
    uint16_t *out = (uint16_t *)scratch + row * padded_ins(m);
    for (int64_t i = 0; i < padded_ins(m); i += LANES)
      store_bf16(out + i, i < m->ins ? load_part(x + i, m->ins - i) : splat(0.0f));
    return;
  }
  Factors *factors = (Factors *)(scratch + rows * blocks * 64) + at;
  for (int64_t b = 0; b < blocks; b++) {
    int32_t value[BLOCK_INS];
    int8_t *out = (int8_t *)scratch + (at + b * in.count) * 64;
    factors[b * in.count] = quantise(x + b * BLOCK_INS, m->offset, value);
    memset(out, 0, 64);
    for (int i = 0; i < BLOCK_INS; i++) out[b % 2 * BLOCK_INS + i] = (int8_t)value[i];
  }
}

static void bf16_tiles(int64_t rows, const Matrix *m, const char *x, float *out, int64_t first) {
  const int64_t stride = padded_ins(m) * 2, second = rows > SIDE;
  const char *w = place(m->values, stride * PANEL, first);
  _Alignas(64) float sums[TILE_ROWS * PAIR];
  TILE_CLEAR();
  for (int64_t at = 0; at < stride; at += 64) {
    TILE_LOAD(6, w + at * PANEL, 64);
    TILE_LOAD(7, w + at * PANEL + stride * PANEL, 64);
    TILE_PRODUCTS(TILE_DOT_BF16, second, x + at, stride)
  }
  TILE_SUMS(sums);
  finish(m, rows, sums, PAIR, out, first);
}

/* The stored values of a panel in `count` (1 or 2) blocks, as bytes, to `buffer`. */
INLINE const char *byte_lines(const int four, const char *values, int64_t bytes, int64_t count,
                              char *buffer) {
  const int64_t size = BLOCK_INS * PANEL;
  for (int64_t b = 0; b < count; b++, values += bytes) {
    if (!four) memcpy(buffer + b * size, values, (size_t)size);
    for (int64_t i = 0; four && i < size; i += 128)
      for (int64_t v = 0; v < 64; v += 4 * LANES) {
        const ivec both = load_i32(values + i / 2 + v), low = low_halves(both), high = high_halves(both);
        memcpy(buffer + b * size + i + v, &low, sizeof low);
        memcpy(buffer + b * size + i + v + 64, &high, sizeof high);
      }
  }
  return buffer;
}

/* total += the scaled sums of one block, for `rows` rows and PAIR outputs. */
INLINE void scale_sums(const Matrix *m, int64_t rows, const int32_t *sums, const Factors *factors,
                       const char *scales, float *total) {
  const int f16 = (int)m->scales_f16, size = f16 ? 2 : 4;
  for (int64_t v = 0; v < PAIR; v += LANES) {
    const char *minima = scales + (m->minima ? PAIR * size : 0);
    const vec scale = load_factor(scales + v * size, f16), minimum = load_factor(minima + v * size, f16);
    const vec shift = scale * splat(-SHIFT);
    for (int64_t r = 0; r < rows; r++) {
      const ivec sum = add_i32(load_i32(sums + r * PAIR + v), splat_i32(factors[r].start));
      float *to = total + r * PAIR + v;
      const vec x = scaled(sum, scale, shift, f16);
      vec acc = fma_(x, splat(factors[r].scale), load_f32(to));
      if (m->minima) acc = fma_(minimum, splat(factors[r].sum), acc);
      store_f32(to, acc);
    }
  }
}

INLINE void quantised_tiles(const int four, int64_t rows, const Matrix *m, const char *values,
                            const Factors *factors, float *out, int64_t first) {
  const int64_t blocks = m->ins / BLOCK_INS, second = rows > SIDE;
  const int64_t bytes = block_bytes(m), panel = block_panel(m);
  const char *w = first_block(m, first);
  _Alignas(64) char buffer[2][TILE_BYTES] = {{0}};
  _Alignas(64) int32_t sums[TILE_ROWS * PAIR];
  _Alignas(64) float total[TILE_ROWS * PAIR] = {0};
  for (int64_t b = 0; b < blocks; b += 2, w += 2 * bytes) {
    const int64_t count = b + 1 < blocks ? 2 : 1;
    TILE_LOAD(6, byte_lines(four, w, bytes, count, buffer[0]), 64);
    TILE_LOAD(7, byte_lines(four, w + panel, bytes, count, buffer[1]), 64);
    for (int64_t i = 0; i < count; i++) {
      TILE_CLEAR();
      TILE_PRODUCTS(TILE_DOT_SU8, second, values + (b + i) * rows * 64, 64)
      TILE_SUMS(sums);
      scale_sums(m, rows, sums, factors + (b + i) * rows, w + i * bytes + 2 * panel, total);
    }
  }
  finish(m, rows, total, PAIR, out, first);
}

/* PAIR outputs, from `first` on, of the rows of one block. */
static void tile_block(const Matrix *m, int64_t rows, RowBlock block, const char *scratch,
                       float *out, int64_t first) {
  const int64_t at = block.first * (m->ins / BLOCK_INS);
  const Factors *factors = (const Factors *)(scratch + rows * (m->ins / BLOCK_INS) * 64) + at;
  configure_tiles();
  if (m->format == LINEAR_BF16)
    bf16_tiles(block.count, m, scratch + block.first * padded_ins(m) * 2, out, first);
  else if (m->format == LINEAR_Q8)
    quantised_tiles(0, block.count, m, scratch + at * 64, factors, out, first);
  else
    quantised_tiles(1, block.count, m, scratch + at * 64, factors, out, first);
}
#endif
