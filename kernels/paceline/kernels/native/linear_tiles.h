/* Linear layers of bfloat16 in tiles: blocks of up to 32 rows times two panels, whose lines are B
 * tiles as they lie. Rows of A tiles beyond the last row are whatever memory holds: their sums are
 * dropped. Activations are rounded to bfloat16; the order of the sums is the processor's, the same
 * for every row. Those of linear_rotated.h and linear_block_tiles.h have tiles of integers. */
#ifndef PACELINE_LINEAR_TILES_H
#define PACELINE_LINEAR_TILES_H

#include "linear_blocks.h"
#include "tiles.h"

#define TILE_ROWS (2 * SIDE)

/* Bytes of prepared activations, [rows][ins rounded up to 32] in bfloat16, for A tiles that reach
 * beyond the last row too. */
static int64_t tile_scratch(const Matrix *m, int64_t rows) {
  return (rows + TILE_ROWS) * padded_ins(m) * 2;
}

static void prepare_tile_row(const Matrix *m, const float *x, char *scratch, int64_t row) {
  uint16_t *out = (uint16_t *)scratch + row * padded_ins(m);
  x += row * m->ins;
  for (int64_t i = 0; i < padded_ins(m); i += LANES)
    store_bf16(out + i, i < m->ins ? load_part(x + i, m->ins - i) : splat(0.0f));
}

/* PAIR outputs, from `first` on, of the rows of one block. The first block of an item fetches for
 * all. */
static void tile_pair(const Matrix *m, RowRange range, const char *scratch, float *out,
                      int64_t first, Turn turn) {
  const int64_t stride = padded_ins(m) * 2, second = range.count > SIDE;
  const int64_t panel = stride * PANEL;
  const char *x = scratch + range.first * stride, *w = place(m->values, panel, first);
  _Alignas(64) float sums[TILE_ROWS * PAIR];
  configure_tiles(64);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t at = 0; at < stride; at += 64) {
    const int64_t ahead = at * PANEL + WEIGHTS_FAR_AHEAD / 2;
    const char *fetch = w + ahead + (ahead < panel ? 0 : panel); /* of this pair or the next */
    for (int line = 0; !turn.number && line < 64 * PANEL; line += 64) {
      __builtin_prefetch(fetch + line, 0, 2);
      __builtin_prefetch(fetch + line + panel, 0, 2);
    }
    TILE_LOAD(6, w + at * PANEL, 64);
    TILE_LOAD(7, w + at * PANEL + panel, 64);
    TILE_LOAD(4, x + at, stride);
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
    if (second) {
      TILE_LOAD(5, x + at + SIDE * stride, stride);
      TILE_DOT_BF16(2, 5, 6);
      TILE_DOT_BF16(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, PAIR * 4);
  TILE_STORE(1, sums + SIDE, PAIR * 4);
  TILE_STORE(2, sums + SIDE * PAIR, PAIR * 4);
  TILE_STORE(3, sums + SIDE * PAIR + SIDE, PAIR * 4);
  finish(m, range.count, sums, PAIR, out, first);
}
#endif
