/* Linear layers in plain C, one number after the other: the reference that every level is compared
 * with when it is loaded. It shares no code with the levels but the conversion of float16. */
#include <stdlib.h>

#include "dots.h"
#include "linear_units.h"

#define BLOCK_INS 32

static float from_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float weight_at(const Matrix *m, int64_t out, int64_t in) {
  const int64_t panel = out / PANEL, lane = out % PANEL, ins = padded_ins(m);
  if (m->format == LINEAR_F32)
    return ((const float *)m->values)[(panel * ins + in) * PANEL + lane];
  const int64_t pair = panel * ins / 2 + in / 2;
  return from_bf16(((const uint16_t *)m->values)[(pair * PANEL + lane) * 2 + in % 2]);
}

static int32_t stored_at(const Matrix *m, int64_t out, int64_t in) {
  const int64_t panel = out / PANEL, lane = out % PANEL;
  const uint8_t *values = m->values;
  if (m->format == LINEAR_Q8)
    return values[((panel * m->ins / 4 + in / 4) * PANEL + lane) * 4 + in % 4];
  const int byte = values[((panel * m->ins / 8 + in / 8) * PANEL + lane) * 4 + in % 4];
  return in / 4 % 2 ? byte >> 4 : byte & 15;
}

static float scale_at(const Matrix *m, const void *scales, int64_t out, int64_t block) {
  const int64_t at = (out / PANEL * (m->ins / BLOCK_INS) + block) * PANEL + out % PANEL;
  if (m->scales_f16) return half_to_float(((const uint16_t *)scales)[at]);
  return ((const float *)scales)[at];
}

static float quantise_plain(const float x[BLOCK_INS], int32_t a[BLOCK_INS]) {
  float largest = 0.0f;
  for (int i = 0; i < BLOCK_INS; i++) a[i] = 0;
  for (int i = 0; i < BLOCK_INS; i++) {
    if (!isfinite(x[i])) return NAN;
    largest = fmaxf(largest, fabsf(x[i]));
  }
  if (largest < 0x1p-100f) return 0.0f;
  const float scale = largest / 127.0f, inverse = 1.0f / scale;
  for (int i = 0; i < BLOCK_INS; i++) a[i] = (int32_t)rintf(x[i] * inverse);
  return scale;
}

/* One output of one row. */
static float output(const Matrix *m, const float *x, int64_t out) {
  float total = 0.0f;
  if (m->format <= LINEAR_BF16)
    for (int64_t k = 0; k < m->ins; k++) total = fmaf(x[k], weight_at(m, out, k), total);
  else
    for (int64_t b = 0; b < m->ins / BLOCK_INS; b++) {
      int32_t a[BLOCK_INS], sum = 0, plain = 0;
      const float scale = quantise_plain(x + b * BLOCK_INS, a);
      for (int64_t i = 0; i < BLOCK_INS; i++) {
        sum += a[i] * (stored_at(m, out, b * BLOCK_INS + i) - (int32_t)m->offset);
        plain += a[i];
      }
      total = fmaf((float)sum, scale_at(m, m->scales, out, b) * scale, total);
      if (m->minima) total = fmaf(scale_at(m, m->minima, out, b), scale * (float)plain, total);
    }
  return m->bias ? total + m->bias[out] : total;
}

void paceline_linear_plain(const Matrix *m, const float *x, int64_t rows, float *out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < m->outs; o++) out[r * m->outs + o] = output(m, x + r * m->ins, o);
}

#define OUTS 50
#define INS 96
#define ROWS 37 /* whole blocks of rows and a smaller one, at every level */
#define PADDED 64

enum { FLOATS, BF16_PAIRS, BYTES, F16_PAIRS };

/* Random words of a kind: floats are in -16 .. 16. */
static void fill(uint32_t *words, int64_t count, int kind, uint32_t *seed) {
  for (int64_t i = 0; i < count; i++) {
    *seed = *seed * 1664525 + 1013904223;
    const float number = (float)(int32_t)*seed * 0x1p-27f;
    uint32_t word;
    memcpy(&word, &number, sizeof word);
    if (kind == BF16_PAIRS) word = (word & 0xffff0000) | (word + 0x12345678) >> 16;
    if (kind == BYTES) word = *seed;
    if (kind == F16_PAIRS) word = (*seed & 0x83ff83ff) | 0x20002400;
    words[i] = word;
  }
}

/* Whether this level gives the bits of plain C in every format, on random data. Returns 0, or 1 +
 * the first format that differs. */
int64_t paceline_linear_check(void) {
  static _Alignas(64) uint32_t values[PADDED * INS], scales[2][PADDED * INS / BLOCK_INS];
  static float x[ROWS * INS], found[ROWS * OUTS], expected[ROWS * OUTS], bias[OUTS];
  uint32_t seed = 1;
  fill((uint32_t *)x, ROWS * INS, FLOATS, &seed);
  fill((uint32_t *)bias, OUTS, FLOATS, &seed);
  for (int kind = 0; kind < 10; kind++) { /* bits 0 and 1: minima, float16 scales */
    const int format = kind < 2 ? kind : LINEAR_Q8 + (kind - 2) / 4;
    const int variant = kind < 2 ? 0 : (kind - 2) % 4, f16 = variant / 2;
    const Matrix m = {OUTS, INS, format, values, kind < 2 ? 0 : scales[0],
                      variant % 2 ? scales[1] : 0, f16, format == LINEAR_Q8 ? 128 : 8, bias};
    fill(values, PADDED * INS, format < LINEAR_Q8 ? format : BYTES, &seed);
    fill(scales[0], 2 * PADDED * INS / BLOCK_INS, f16 ? F16_PAIRS : FLOATS, &seed);
    paceline_linear_plain(&m, x, ROWS, expected);
    void *scratch = malloc((size_t)linear_scratch(&m, ROWS));
    for (int64_t i = 0; i < linear_prepare_items(&m, ROWS); i++)
      linear_prepare(&m, x, ROWS, scratch, i);
    for (int64_t i = 0; i < linear_items(&m, ROWS, 1); i++)
      linear_item(&m, x, scratch, ROWS, found, i);
    free(scratch);
    if (memcmp(found, expected, sizeof found)) return 1 + format;
  }
  return 0;
}
