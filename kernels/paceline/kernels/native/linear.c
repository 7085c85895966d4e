/* Linear layers: the pieces of a product, and their order. See linear.h for the contract. */
#include "linear_float.h"
#include "linear_rotated.h"
#include "linear_tiles.h"
#include "linear_block_tiles.h"

static int rotated(const Matrix *m) { return m->format == LINEAR_ROTATED; }

static int quantised(const Matrix *m) { return m->format == LINEAR_Q8 || m->format == LINEAR_Q4; }

static int in_tiles(const Matrix *m) { return m->tiles_bf16 && m->format == LINEAR_BF16; }

/* Rows from which products over blocks are in tiles: with fewer, vectors take as long. Tests of
 * emulated tiles change it. */
#ifdef __AMX_INT8__
int64_t paceline_tile_rows = 48;
#else
int64_t paceline_tile_rows = INT64_MAX;
#endif

static int in_block_tiles(const Matrix *m, int64_t rows) {
  return quantised(m) && rows >= paceline_tile_rows;
}

static int64_t max_rows(const Matrix *m, int64_t rows) {
  if (in_block_tiles(m, rows)) return SIDE;
  if (rotated(m)) return rotated_rows(rows);
  if (in_tiles(m)) return TILE_ROWS;
  return quantised(m) ? QUANTISED_ROWS : FLOAT_ROWS;
}

int64_t linear_scratch(const Matrix *m, int64_t rows) {
  if (rotated(m)) return rotated_scratch(m, rows);
  if (in_tiles(m)) return tile_scratch(m, rows);
  if (!quantised(m)) return 0;
  /* In tiles a row takes less, but ranges of rows are filled up: more rows never take less. */
  if (in_block_tiles(m, rows)) rows += SIDE - 1;
  return rows * (m->ins / QUANT_BLOCK) * (int64_t)sizeof(Activations);
}

int64_t linear_prepare_items(const Matrix *m, int64_t rows) {
  return rotated(m) || in_tiles(m) || quantised(m) ? rows : 0;
}

void linear_prepare(const Matrix *m, const float *x, int64_t rows, void *scratch, int64_t item) {
  CHECK(item >= 0 && item < rows);
  if (in_block_tiles(m, rows))
    prepare_row_tile(m, x, rows, scratch, item);
  else if (rotated(m))
    prepare_rotated_row(m, x, rows, scratch, item);
  else if (in_tiles(m))
    prepare_tile_row(m, x, scratch, item);
  else
    quantise_row(m, x, rows, scratch, item);
}

/* Outputs from `first` on of a range of rows: UNIT of floats without tiles, else PAIR. */
static void multiply(const Matrix *m, const float *x, const void *scratch, RowRange range,
                     float *out, int64_t first, Turn turn) {
  x += range.first * m->ins, out += range.first * m->outs;
  if (in_tiles(m)) {
    tile_pair(m, range, scratch, out, first, turn);
    return;
  }
  if (m->format == LINEAR_F32)
    f32_rows(range.count, m, x, out, first, turn);
  else
    bf16_rows(range.count, m, x, out, first, turn);
}

/* An item is two panels times some ranges of rows. */
int64_t linear_items(const Matrix *m, int64_t rows) {
  return divide_up(m->outs, PAIR) * divide_up(rows, range_rows(rows, max_rows(m, rows)) * RANGES);
}

void linear_item(const Matrix *m, const float *x, const void *scratch, int64_t rows, float *out,
                 int64_t item) {
  const int64_t limit = max_rows(m, rows), chunk = range_rows(rows, limit) * RANGES;
  const int64_t chunks = divide_up(rows, chunk), unit = in_tiles(m) ? PAIR : UNIT;
  const int64_t first = item / chunks * PAIR, start = item % chunks * chunk;
  const int64_t stop = start + chunk < rows ? start + chunk : rows;
  CHECK(first >= 0 && first < m->outs && start < stop);
  if (rotated(m)) {
    rotated_item(m, scratch, rows, start, stop, out, first);
    return;
  }
  if (quantised(m)) {
    block_item(m, scratch, in_block_tiles(m, rows), range_rows(rows, limit), start, stop, out,
               first);
    return;
  }
  const int64_t ranges = divide_up(stop - start, range_rows(rows, limit));
  for (int64_t o = first; o < first + PAIR && o < m->outs; o += unit)
    for (int64_t r = start, number = 0; r < stop; number++) {
      const RowRange range = row_range(rows, limit, r);
      multiply(m, x, scratch, range, out, o, (Turn){number, ranges});
      r += range.count;
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

void paceline_rows(const Matrix *m, const int64_t *rows, int64_t count, float *out) {
  check_matrix(m);
#pragma omp parallel for schedule(static) if (count > 64)
  for (int64_t i = 0; i < count; i++) {
    CHECK(rows[i] >= 0 && rows[i] < m->outs);
    linear_row(m, rows[i], out + i * m->ins);
  }
}

int64_t paceline_linear_scratch(const Matrix *m, int64_t rows) { return linear_scratch(m, rows); }

/* Rotates and quantises rows of weights: values int8 [rows, ins], scales [rows]. */
void paceline_quantise_rows(const float *x, int64_t rows, int64_t ins, int64_t size, char *values,
                            float *scales) {
  CHECK(size > 0 && size <= MAX_ROTATION && ins % size == 0 && ins <= MAX_ROTATED_INS);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    char row[divide_up(ins, WHOLE) * WHOLE];
    int32_t total;
    scales[r] = quantise_rotated(x + r * ins, ins, size, row, &total);
    memcpy(values + r * ins, row, (size_t)ins);
  }
}
