/* Items of products over blocks of 4 and 8 bits. Weights that several ranges of rows read are
 * unpacked once for all, in stretches. Ranges of many rows are in tiles of integers: a tile has the
 * sums of 16 outputs and up to 16 rows over one block. Sums are exact, and are scaled and added in
 * the order of linear.h: the bits are those of the vectors. */
#ifndef PACELINE_LINEAR_BLOCK_TILES_H
#define PACELINE_LINEAR_BLOCK_TILES_H

#include "linear_blocks.h"
#include "tiles.h"

#define TILES_AHEAD 3 /* blocks whose sums are computed before those of a block are read */

/* The activations of up to 16 rows over one block; rows beyond the last are copies of it. */
typedef struct {
  char values[SIDE][QUANT_BLOCK];
  float scale[SIDE], sum[SIDE]; /* see Factors */
} RowTile;

_Static_assert(sizeof(RowTile) <= SIDE * sizeof(Activations), "linear_scratch counts these");

/* Prepared activations are RowTile [range][block]. */
static void prepare_row_tile(const Matrix *m, const float *x, int64_t rows, void *scratch,
                             int64_t row) {
  const RowRange in = row_range(rows, SIDE, row);
  const int64_t blocks = m->ins / QUANT_BLOCK, at = row - in.first;
  const int64_t stop = at == in.count - 1 ? SIDE : at + 1;
  RowTile *tile = (RowTile *)scratch + in.first / range_rows(rows, SIDE) * blocks;
  for (int64_t b = 0; b < blocks; b++, tile++) {
    int32_t value[QUANT_BLOCK];
    const Factors factors = quantise(x + row * m->ins + b * QUANT_BLOCK, 0, value);
    for (int i = 0; i < QUANT_BLOCK; i++) tile->values[at][i] = (char)value[i];
    for (int64_t r = at; r < stop; r++) {
      if (r > at) memcpy(tile->values[r], tile->values[at], QUANT_BLOCK);
      tile->scale[r] = factors.scale, tile->sum[r] = factors.sum;
    }
  }
}

/* Adds a stretch to the totals [rows][PAIR] of a range of rows, for one panel. */
INLINE void add_tiles(const int rows, const int minima, const UnpackedPanel *w, const RowTile *a,
                      int64_t blocks, float *totals) {
  _Alignas(64) int32_t sums[TILES_AHEAD + 1][SIDE * SIDE];
  vec total[SIDE][PANEL / LANES];
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL / LANES; v++) total[r][v] = load_f32(totals + r * PAIR + v * LANES);
#pragma GCC unroll 1
  for (int64_t b = -TILES_AHEAD; b < blocks; b++) {
    const int64_t next = b + TILES_AHEAD;
    if (next < blocks) {
      TILE_ZERO(0);
      TILE_LOAD_ROWS(4, a[next].values, QUANT_BLOCK);
      TILE_LOAD_LINES(6, w[2 * next].values, 4 * PANEL);
      TILE_DOT_BYTES(0, 4, 6);
      TILE_STORE(0, sums[next % (TILES_AHEAD + 1)], SIDE * 4);
    }
    if (b < 0) continue;
    const int32_t *sum = sums[b % (TILES_AHEAD + 1)];
#pragma GCC unroll 4
    for (int v = 0; v < PANEL / LANES; v++) {
      const vec scale = load_f32(w[2 * b].scale + v * LANES);
      const vec minimum = load_f32(w[2 * b].minimum + v * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++) {
        const vec whole = to_float(load_i32(sum + r * SIDE + v * LANES));
        total[r][v] = fma_(fma_(whole, scale, splat(0.0f)), splat(a[b].scale[r]), total[r][v]);
        if (minima) total[r][v] = fma_(minimum, splat(a[b].sum[r]), total[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL / LANES; v++) store_f32(totals + r * PAIR + v * LANES, total[r][v]);
}

/* Adds a stretch to the totals [rows][PAIR] of a range of rows. The number of rows is a literal in
 * each case, so that totals stay in registers. */
static void add_row_tiles(int64_t rows, int minima, const UnpackedPanel *w, const RowTile *a,
                          int64_t blocks, const char *block, int64_t bytes, Turn turn,
                          float *totals) {
  for (int panel = 0; panel < 2; panel++, w++, totals += PANEL) {
    for (int64_t b = 2 * turn.number + panel; b < blocks; b += 2 * turn.count)
      fetch_ahead(block + b * bytes, bytes);
    if (rows <= 12)
      minima ? add_tiles(12, 1, w, a, blocks, totals) : add_tiles(12, 0, w, a, blocks, totals);
    else
      minima ? add_tiles(16, 1, w, a, blocks, totals) : add_tiles(16, 0, w, a, blocks, totals);
  }
}

/* PAIR outputs, from `first` on, of rows start .. stop - 1, in ranges of `size` rows. */
static void block_item(const Matrix *m, const void *scratch, const int tiles, int64_t size,
                       int64_t start, int64_t stop, float *out, int64_t first) {
  const FormatKernels *kernels = format_kernels(m);
  const int64_t blocks = m->ins / QUANT_BLOCK, bytes = block_bytes(m);
  const int64_t ranges = divide_up(stop - start, size), table = (tiles ? SIDE : size) * PAIR;
  const char *block = first_block(m, first);
  const int64_t stretch = !tiles && ranges == 1 ? blocks : STRETCH_BLOCKS;
  _Alignas(64) UnpackedPanel unpacked[STRETCH_BLOCKS * 2];
  _Alignas(64) float totals[RANGES * SIDE * PAIR];
  for (int64_t i = 0; i < ranges * table; i++) totals[i] = 0.0f;
  if (tiles) configure_tiles(QUANT_BLOCK);
  for (int64_t b = 0; b < blocks; b += stretch, block += stretch * bytes) {
    const int64_t count = blocks - b < stretch ? blocks - b : stretch;
    if (tiles) kernels->unpack((int32_t)m->offset, block, count, unpacked);
    for (int64_t r = 0; r < ranges; r++) {
      const int64_t row = start + r * size, n = stop - row < size ? stop - row : size;
      if (tiles)
        add_row_tiles(n, (int)m->minima, unpacked,
                      (const RowTile *)scratch + row / size * blocks + b, count, block, bytes,
                      (Turn){r, ranges}, totals + r * table);
      else
        kernels->add(n, block, count, (const Activations *)scratch + row * blocks + b * n,
                     totals + r * table, (Turn){r, ranges});
    }
  }
  for (int64_t r = 0; r < ranges; r++) {
    const int64_t row = start + r * size, n = stop - row < size ? stop - row : size;
    finish(m, n, totals + r * table, PAIR, out + row * m->outs, first);
  }
}
#endif
