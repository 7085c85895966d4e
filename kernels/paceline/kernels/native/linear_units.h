/* How a product is divided: units of outputs times ranges of rows, both kept in registers. */
#ifndef PACELINE_LINEAR_UNITS_H
#define PACELINE_LINEAR_UNITS_H

#include "linear.h"
#include "vectors.h"

#define PANEL 16
#define PAIR 32 /* outputs of an item: two panels */
#if LANES == 16
#define VECTORS 2 /* vectors of outputs in a unit */
#else
#define VECTORS (PANEL / LANES)
#endif
#define UNIT (VECTORS * LANES)

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t padded_ins(const Matrix *m) { return divide_up(m->ins, 32) * 32; }

/* Rows of a block, such that blocks of at most `limit` rows are as equal as possible. */
INLINE int64_t range_rows(int64_t rows, int64_t limit) {
  return divide_up(rows, divide_up(rows, limit));
}

/* The range of rows that contains `row`. */
typedef struct {
  int64_t first, count;
} RowRange;

INLINE RowRange row_range(int64_t rows, int64_t limit, int64_t row) {
  const int64_t size = range_rows(rows, limit), first = row / size * size;
  return (RowRange){first, first + size < rows ? size : rows - first};
}

/* Which of the ranges of an item a range is. They read the same weights, one after the other; each
 * fetches its share of those of the next outputs, so that memory is busy all the time. */
typedef struct {
  int64_t number, count;
} Turn;

/* Place of output `out` in panels of this many bytes, whose lines have 4 bytes an output. */
INLINE const char *place(const void *base, int64_t panel_bytes, int64_t out) {
  return (const char *)base + out / PANEL * panel_bytes + out % PANEL * 4;
}

#define QUANT_BLOCK 32

/* Bytes of the parts of a quantised block, see linear.h. */
INLINE int64_t block_panel(const Matrix *m) {
  return QUANT_BLOCK * PANEL / (m->format == LINEAR_Q4 ? 2 : 1);
}
INLINE int64_t block_factors(const Matrix *m) { return PAIR * (m->scales_f16 ? 2 : 4); }
INLINE int64_t block_bytes(const Matrix *m) {
  return 2 * block_panel(m) + block_factors(m) * (m->minima ? 2 : 1);
}

/* The first block of the two panels that contain output `out`. */
INLINE const char *first_block(const Matrix *m, int64_t out) {
  return (const char *)m->values + out / PAIR * (m->ins / QUANT_BLOCK) * block_bytes(m);
}

/* Adds the bias to `rows` rows of `width` sums and stores them; `out` is the first row. Not
 * inlined: the blocks of all sizes share it. */
static __attribute__((noinline)) void finish(const Matrix *m, int64_t rows, const float *sums,
                                             int64_t width, float *out, int64_t first) {
  for (int64_t r = 0; r < rows; r++, sums += width, out += m->outs)
    for (int64_t v = 0; v < width; v += LANES) {
      const int64_t at = first + v, left = m->outs - at;
      if (left <= 0) continue;
      vec total = load_f32(sums + v);
      if (m->bias) total += load_part(m->bias + at, left);
      store_part(out, at, left, 0, total);
    }
}
#endif
