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
  ZERO_SUMS;
  for (int64_t at = 0; at < stride; at += 64) {
    const int64_t ahead = at * PANEL + WEIGHTS_FAR_AHEAD / 2;
    const char *fetch = w + ahead + (ahead < panel ? 0 : panel); /* of this pair or the next */
    for (int at = 0; !turn.number && at < 64 * PANEL; at += 64) {
      __builtin_prefetch(fetch + at, 0, 2);
      __builtin_prefetch(fetch + at + panel, 0, 2);
    }
    const char *line = w + at * PANEL;
    ADD_PRODUCTS(TILE_DOT_BF16, x + at, stride, second, line, line + panel, 64);
  }
  STORE_SUMS(sums, PAIR);
  finish(m, range.count, sums, PAIR, out, first);
}
#endif
