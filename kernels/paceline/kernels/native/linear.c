/* Linear layers: the pieces of a product, and their order. See linear.h for the contract. */
#include "linear_float.h"
#include "linear_tiles.h"

#define BLOCKS 8 /* blocks of rows in an item */

static int quantised(const Matrix *m) { return m->format >= LINEAR_Q8; }

static int in_tiles(const Matrix *m) { return m->tiles_bf16 && m->format == LINEAR_BF16; }

static int64_t max_rows(const Matrix *m) {
  if (in_tiles(m)) return TILE_ROWS;
  return quantised(m) ? BLOCK_ROWS : FLOAT_ROWS;
}

int64_t linear_scratch(const Matrix *m, int64_t rows) {
  if (in_tiles(m)) return tile_scratch(m, rows);
  return quantised(m) ? rows * (m->ins / BLOCK_INS) * (int64_t)sizeof(Activations) : 0;
}

int64_t linear_prepare_items(const Matrix *m, int64_t rows) {
  return in_tiles(m) || quantised(m) ? rows : 0;
}

void linear_prepare(const Matrix *m, const float *x, int64_t rows, void *scratch, int64_t item) {
  if (in_tiles(m))
    prepare_tile_row(m, x, scratch, item);
  else
    quantise_row(m, x, rows, scratch, item);
}

/* Outputs from `first` on of a block of rows: UNIT of floats without tiles, else PAIR. `later`: an
 * earlier block of rows used the same weights. */
static void multiply(const Matrix *m, const float *x, const void *scratch, int64_t rows,
                     RowBlock block, float *out, int64_t first, int later) {
  const Activations *a = (const Activations *)scratch + block.first * (m->ins / BLOCK_INS);
  x += block.first * m->ins, out += block.first * m->outs;
  if (in_tiles(m)) {
    tile_block(m, block, scratch, out, first);
    return;
  }
  if (m->format == LINEAR_F32)
    f32_rows(block.count, m, x, out, first);
  else if (m->format == LINEAR_BF16)
    bf16_rows(block.count, m, x, out, first);
  else
    quantised_kernel(m, rows)(block.count, m, a, out, first, later);
}

/* An item is two panels times some blocks of rows. */
int64_t linear_items(const Matrix *m, int64_t rows) {
  return divide_up(m->outs, PAIR) * divide_up(rows, block_rows(rows, max_rows(m)) * BLOCKS);
}

void linear_item(const Matrix *m, const float *x, const void *scratch, int64_t rows, float *out,
                 int64_t item) {
  const int64_t limit = max_rows(m), chunk = block_rows(rows, limit) * BLOCKS;
  const int64_t chunks = divide_up(rows, chunk), unit = quantised(m) || in_tiles(m) ? PAIR : UNIT;
  const int64_t first = item / chunks * PAIR, start = item % chunks * chunk;
  for (int64_t o = first; o < first + PAIR && o < m->outs; o += unit)
    for (int64_t r = start; r < start + chunk && r < rows;) {
      const RowBlock block = row_block(rows, limit, r);
      multiply(m, x, scratch, rows, block, out, o, r > start);
      r += block.count;
    }
}

/* The whole product on the threads of OpenMP; `scratch` has linear_scratch bytes. */
void paceline_linear(const Matrix *m, const float *x, int64_t rows, void *scratch, float *out) {
  check_matrix(m);
  CHECK(rows >= 0 && (!rows || (x && out)));
  const int64_t prepared = linear_prepare_items(m, rows), items = linear_items(m, rows);
#pragma omp parallel if (!little_work(rows, m->outs * m->ins))
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < prepared; i++) linear_prepare(m, x, rows, scratch, i);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < items; i++) linear_item(m, x, scratch, rows, out, i);
  }
}

int64_t paceline_linear_scratch(const Matrix *m, int64_t rows) { return linear_scratch(m, rows); }
