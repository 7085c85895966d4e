/* Linear layers: the pieces of a product, and their order. See linear.h for the contract. */
#include "linear_blocks.h"
#include "linear_float.h"

#define BLOCKS 8 /* blocks of rows in an item */

static int quantised(const Matrix *m) { return m->format >= LINEAR_Q8; }

static int64_t most_rows(const Matrix *m) { return quantised(m) ? BLOCK_ROWS : FLOAT_ROWS; }

int64_t linear_scratch(const Matrix *m, int64_t rows) {
  return quantised(m) ? rows * (m->ins / BLOCK_INS) * (int64_t)sizeof(Activations) : 0;
}

int64_t linear_prepare_items(const Matrix *m, int64_t rows) { return quantised(m) ? rows : 0; }

void linear_prepare(const Matrix *m, const float *x, int64_t rows, void *scratch, int64_t item) {
  quantise_row(m, x, rows, most_rows(m), scratch, item);
}

/* An item is two panels times some blocks of rows. */
int64_t linear_items(const Matrix *m, int64_t rows, int64_t threads) {
  (void)threads;
  return divide_up(m->outs, PAIR) * divide_up(rows, block_rows(rows, most_rows(m)) * BLOCKS);
}

void linear_item(const Matrix *m, const float *x, const void *scratch, int64_t rows, float *out,
                 int64_t item) {
  const int64_t size = block_rows(rows, most_rows(m)), chunks = divide_up(rows, size * BLOCKS);
  const int64_t first = item / chunks * PAIR, start = item % chunks * size * BLOCKS;
  const int64_t stop = start + size * BLOCKS < rows ? start + size * BLOCKS : rows;
  for (int64_t o = first; o < first + PAIR && o < m->outs; o += UNIT)
    for (int64_t r = start; r < stop; r += size) {
      const int64_t count = stop - r < size ? stop - r : size;
      const Activations *a = (const Activations *)scratch + r * (m->ins / BLOCK_INS);
      float *to = out + r * m->outs;
      switch (m->format) {
        case LINEAR_F32: f32_rows(count, m, x + r * m->ins, to, o); break;
        case LINEAR_BF16: bf16_rows(count, m, x + r * m->ins, to, o); break;
        case LINEAR_Q8: q8_rows(count, m, a, to, o); break;
        case LINEAR_Q4: q4_rows(count, m, a, to, o); break;
      }
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
