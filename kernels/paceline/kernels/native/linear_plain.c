/* Linear layers in plain C, one number after the other: the reference that every level is compared
 * with when it is loaded, and the rows of packed weights. It shares no code with the levels but the
 * conversion of float16. */
#include <stdlib.h>

#include "dots.h"
#include "linear_units.h"

static float from_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float weight_at(const Matrix *m, int64_t out, int64_t in) {
  const int64_t panel = out / PANEL, lane = out % PANEL, ins = padded_ins(m);
  if (m->format == LINEAR_F32) return ((const float *)m->values)[(panel * ins + in) * PANEL + lane];
  const int64_t pair = panel * ins / 2 + in / 2;
  return from_bf16(((const uint16_t *)m->values)[(pair * PANEL + lane) * 2 + in % 2]);
}

static const uint8_t *block_at(const Matrix *m, int64_t out, int64_t block) {
  const int64_t bits = m->format == LINEAR_Q8 ? 8 : 4, factor = m->scales_f16 ? 2 : 4;
  const int64_t bytes = PAIR * (QUANT_BLOCK * bits / 8 + factor * (m->minima ? 2 : 1));
  return (const uint8_t *)m->values + (out / PAIR * (m->ins / QUANT_BLOCK) + block) * bytes;
}

static int32_t stored_at(const Matrix *m, int64_t out, int64_t in) {
  const int64_t panel = out / PANEL % 2, lane = out % PANEL, i = in % QUANT_BLOCK;
  const uint8_t *values = block_at(m, out, in / QUANT_BLOCK);
  if (m->format == LINEAR_Q8) return values[((panel * 8 + i / 4) * PANEL + lane) * 4 + i % 4];
  const int byte = values[((panel * 4 + i / 8) * PANEL + lane) * 4 + i % 4];
  return i / 4 % 2 ? byte >> 4 : byte & 15;
}

/* Kind 0: a scale; 1: a minimum. */
static float factor_at(const Matrix *m, int kind, int64_t out, int64_t block) {
  const int64_t bits = m->format == LINEAR_Q8 ? 8 : 4, at = kind * PAIR + out % PAIR;
  const uint8_t *factors = block_at(m, out, block) + PAIR * QUANT_BLOCK * bits / 8;
  if (m->scales_f16) return half_to_float(((const uint16_t *)factors)[at]);
  return ((const float *)factors)[at];
}

/* Hadamard transforms of blocks of numbers, not normalised: neighbours first. */
static void rotate_plain(float *x, int64_t count, int64_t size) {
  for (int64_t step = 1; step < size; step *= 2)
    for (int64_t i = 0; i < count; i++)
      if (!(i & step)) {
        const float low = x[i], high = x[i + step];
        x[i] = low + high, x[i + step] = low - high;
      }
}

/* The weights of PAIR outputs of a rotated matrix, before their scales. */
static const uint8_t *pair_at(const Matrix *m, int64_t out) {
  return (const uint8_t *)m->values + out / PAIR * PAIR * ((m->ins + 63) / 64 * 64 + 4);
}

static int32_t integer_at(const Matrix *m, int64_t out, int64_t in) {
  return pair_at(m, out)[(in / 4 * PAIR + out % PAIR) * 4 + in % 4] - 128;
}

static float scale_at(const Matrix *m, int64_t out) {
  return ((const float *)(pair_at(m, out) + (m->ins + 63) / 64 * 64 * PAIR))[out % PAIR];
}

void linear_row(const Matrix *m, int64_t row, float *out) {
  if (m->format == LINEAR_ROTATED) { /* sums of whole numbers are exact */
    for (int64_t k = 0; k < m->ins; k++) out[k] = (float)integer_at(m, row, k);
    rotate_plain(out, m->ins, m->rotation);
    for (int64_t k = 0; k < m->ins; k++) out[k] *= scale_at(m, row);
    return;
  }
  for (int64_t k = 0; k < m->ins; k++) {
    if (m->format <= LINEAR_BF16) {
      out[k] = weight_at(m, row, k);
      continue;
    }
    const int64_t block = k / QUANT_BLOCK;
    out[k] = (float)(stored_at(m, row, k) - m->offset) * factor_at(m, 0, row, block);
    if (m->minima) out[k] += factor_at(m, 1, row, block);
  }
}

static float quantise_plain(const float x[QUANT_BLOCK], int32_t a[QUANT_BLOCK]) {
  float largest = 0.0f;
  for (int i = 0; i < QUANT_BLOCK; i++) a[i] = 0;
  for (int i = 0; i < QUANT_BLOCK; i++) {
    if (!isfinite(x[i])) return NAN;
    largest = fmaxf(largest, fabsf(x[i]));
  }
  if (largest < 0x1p-100f) return 0.0f;
  const float scale = largest / 127.0f, inverse = 1.0f / scale;
  for (int i = 0; i < QUANT_BLOCK; i++) a[i] = (int32_t)rintf(x[i] * inverse);
  return scale;
}

/* The outputs of one row of a rotated matrix. */
static void rotated_outputs(const Matrix *m, const float *x, float *out) {
  float turned[m->ins], largest = 0.0f;
  int32_t values[m->ins], finite = 1;
  memcpy(turned, x, sizeof turned);
  rotate_plain(turned, m->ins, m->rotation);
  for (int64_t k = 0; k < m->ins; k++) {
    finite &= isfinite(turned[k]) != 0;
    largest = fmaxf(largest, fabsf(turned[k]));
  }
  largest = fmaxf(largest, 0x1p-100f);
  const float inverse = 127.0f / largest, scale = finite ? largest / 127.0f : NAN;
  for (int64_t k = 0; k < m->ins; k++) values[k] = finite ? (int32_t)rintf(turned[k] * inverse) : 0;
  for (int64_t o = 0; o < m->outs; o++) {
    int32_t sum = 0;
    for (int64_t k = 0; k < m->ins; k++) sum += values[k] * integer_at(m, o, k);
    out[o] = (float)sum * scale * scale_at(m, o);
    if (m->bias) out[o] += m->bias[o];
  }
}

/* One output of one row. */
static float output(const Matrix *m, const float *x, int64_t out) {
  float total = 0.0f;
  if (m->format <= LINEAR_BF16)
    for (int64_t k = 0; k < m->ins; k++) total = fmaf(x[k], weight_at(m, out, k), total);
  else
    for (int64_t b = 0; b < m->ins / QUANT_BLOCK; b++) {
      int32_t a[QUANT_BLOCK], sum = 0, plain = 0;
      const float scale = quantise_plain(x + b * QUANT_BLOCK, a);
      for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        sum += a[i] * (stored_at(m, out, b * QUANT_BLOCK + i) - (int32_t)m->offset);
        plain += a[i];
      }
      total = fmaf(fmaf((float)sum, factor_at(m, 0, out, b), 0.0f), scale, total);
      if (m->minima) total = fmaf(factor_at(m, 1, out, b), scale * (float)plain, total);
    }
  return m->bias ? total + m->bias[out] : total;
}

void paceline_linear_plain(const Matrix *m, const float *x, int64_t rows, float *out) {
  for (int64_t r = 0; r < rows; r++)
    if (m->format == LINEAR_ROTATED)
      rotated_outputs(m, x + r * m->ins, out + r * m->outs);
    else
      for (int64_t o = 0; o < m->outs; o++) out[r * m->outs + o] = output(m, x + r * m->ins, o);
}

#define OUTS 50
#define INS 96
#define ROWS 37 /* whole ranges of rows and a smaller one, at every level */
#define PADDED 64
#define WIDE 1024

enum { FLOATS, BF16_PAIRS, BYTES, F16_PAIRS, WHOLE_PAIRS };

/* Random words of a kind: floats and pairs of bfloat16 are in -16 .. 16. */
static void fill(uint32_t *words, int64_t count, int kind, uint32_t *seed) {
  for (int64_t i = 0; i < count; i++) {
    *seed = *seed * 1664525 + 1013904223;
    float number = (float)(int32_t)*seed * 0x1p-27f;
    uint32_t word;
    if (kind == WHOLE_PAIRS) number = rintf(number);
    memcpy(&word, &number, sizeof word);
    if (kind >= BF16_PAIRS) word = (word & 0xffff0000) | word >> 16;
    if (kind == BYTES) word = *seed;
    if (kind == F16_PAIRS) word = (*seed & 0x83ff83ff) | 0x20002400;
    words[i] = word;
  }
}

/* Random blocks of a quantised matrix. */
static void fill_blocks(const Matrix *m, uint32_t *words, uint32_t *seed) {
  const int64_t words_of_values = 2 * block_panel(m) / 4, all = block_bytes(m) / 4;
  for (int64_t b = 0; b < PADDED / PAIR * (INS / QUANT_BLOCK); b++, words += all) {
    fill(words, words_of_values, BYTES, seed);
    fill(words + words_of_values, all - words_of_values, m->scales_f16 ? F16_PAIRS : FLOATS, seed);
  }
}

static int differs(const Matrix *m, const float *x, int64_t rows) {
  static float found[ROWS * OUTS], expected[ROWS * OUTS];
  void *scratch = malloc((size_t)linear_scratch(m, rows));
  for (int64_t i = 0; i < linear_prepare_items(m, rows); i++)
    linear_prepare(m, x, rows, scratch, i);
  for (int64_t i = 0; i < linear_items(m, rows); i++) linear_item(m, x, scratch, rows, found, i);
  free(scratch);
  paceline_linear_plain(m, x, rows, expected);
  return memcmp(found, expected, (size_t)(rows * m->outs) * sizeof *found) != 0;
}

/* Of rotated layers: blocks of all numbers of rows, and several; one stretch of weights and more,
 * with and without padded inputs. */
static int rotated_differs(const float *x, const float *bias, uint32_t *seed) {
  static _Alignas(64) uint32_t values[PADDED * (WIDE / 4 + 1)];
  static const int64_t shapes[][2] = {{40, 8}, {INS, 32}, {WIDE, MAX_ROTATION}};
  Matrix m = {.outs = OUTS, .format = LINEAR_ROTATED, .values = values, .bias = bias};
  for (int i = 0; i < 3; i++) {
    m.ins = shapes[i][0], m.rotation = shapes[i][1];
    const int64_t words = PAIR * ((m.ins + 63) / 64 * 16);
    for (int64_t pair = 0; pair < PADDED / PAIR; pair++) {
      fill(values + pair * (words + PAIR), words, BYTES, seed);
      fill(values + pair * (words + PAIR) + words, PAIR, FLOATS, seed);
    }
    for (int64_t rows = 1; rows <= ROWS; rows += m.ins == WIDE ? 12 : rows < 12 ? 1 : 25)
      if (differs(&m, x, rows)) return 1;
  }
  return 0;
}

/* Whether this level gives the bits of plain C in every format, on random data. Returns 0, or 1 +
 * the first format that differs. Not on two threads at once. */
int64_t paceline_linear_check(void) {
  static _Alignas(64) uint32_t values[PADDED * INS];
  static float x[ROWS * WIDE], bias[OUTS];
  uint32_t seed = 1;
  Matrix m = {.outs = OUTS, .ins = INS, .values = values, .bias = bias};
  fill((uint32_t *)x, ROWS * WIDE, FLOATS, &seed);
  fill((uint32_t *)bias, OUTS, FLOATS, &seed);
  for (m.format = LINEAR_F32; m.format <= LINEAR_BF16; m.format++) {
    fill(values, PADDED * INS, m.format == LINEAR_F32 ? FLOATS : BF16_PAIRS, &seed);
    if (differs(&m, x, ROWS)) return 1 + m.format;
  }
  for (m.format = LINEAR_Q8; m.format <= LINEAR_Q4; m.format++)
    for (int variant = 0; variant < 4; variant++) {
      m.scales_f16 = variant & 1;
      m.minima = variant >> 1;
      m.offset = m.format == LINEAR_Q8 ? 128 : 8;
      fill_blocks(&m, values, &seed);
      if (differs(&m, x, ROWS)) return 1 + m.format;
    }
  m.minima = m.scales_f16 = m.offset = 0;
  if (rotated_differs(x, bias, &seed)) return 1 + LINEAR_ROTATED;
  /* Tiles sum in an order of their own: sums of whole numbers are exact in any. */
  m.format = LINEAR_BF16;
  fill(values, PADDED * INS, WHOLE_PAIRS, &seed);
  for (int i = 0; i < ROWS * INS; i++) x[i] = rintf(x[i]);
  for (int i = 0; i < OUTS; i++) bias[i] = rintf(bias[i]);
  m.tiles_bf16 = 1;
  return differs(&m, x, ROWS) ? 1 + LINEAR_BF16 : 0;
}
