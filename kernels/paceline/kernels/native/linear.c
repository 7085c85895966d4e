/* Linear layers: the pieces of a product, and their order. See linear.h for the contract. */
#include "linear_float.h"

#define BLOCKS 8 /* blocks of rows in an item */

static int64_t most_rows(const Matrix *m) {
  (void)m;
  return FLOAT_ROWS;
}

static int64_t item_rows(const Matrix *m, int64_t rows) {
  return block_rows(rows, most_rows(m)) * BLOCKS;
}

int64_t linear_scratch(const Matrix *m, int64_t rows) {
  (void)m, (void)rows;
  return 0;
}

int64_t linear_prepare_items(const Matrix *m, int64_t rows) {
  (void)m, (void)rows;
  return 0;
}

void linear_prepare(const Matrix *m, const float *x, int64_t rows, void *scratch, int64_t item) {
  (void)m, (void)x, (void)rows, (void)scratch, (void)item;
}

int64_t linear_items(const Matrix *m, int64_t rows, int64_t threads) {
  (void)threads;
  return divide_up(m->outs, PAIR) * divide_up(rows, item_rows(m, rows));
}

void linear_item(const Matrix *m, const float *x, const void *scratch, int64_t rows, float *out,
                 int64_t item) {
  const int64_t block = block_rows(rows, most_rows(m)), chunk = item_rows(m, rows);
  const int64_t chunks = divide_up(rows, chunk);
  const int64_t first = item / chunks * PAIR, start = item % chunks * chunk;
  const int64_t stop = start + chunk < rows ? start + chunk : rows;
  (void)scratch;
  for (int64_t at = first; at < first + PAIR && at < m->outs; at += UNIT)
    for (int64_t r = start; r < stop; r += block) {
      const int64_t count = stop - r < block ? stop - r : block;
      if (m->format == LINEAR_BF16)
        bf16_rows(count, m, x + r * m->ins, out + r * m->outs, at);
      else
        f32_rows(count, m, x + r * m->ins, out + r * m->outs, at);
    }
}

/* The whole product on the threads of OpenMP; `scratch` has linear_scratch bytes. */
void paceline_linear(const Matrix *m, const float *x, int64_t rows, void *scratch, float *out) {
  const int64_t prepared = linear_prepare_items(m, rows), items = linear_items(m, rows, 1);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < prepared; i++) linear_prepare(m, x, rows, scratch, i);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < items; i++) linear_item(m, x, scratch, rows, out, i);
  }
}

int64_t paceline_linear_scratch(const Matrix *m, int64_t rows) { return linear_scratch(m, rows); }
