/* Linear layers over weights that are packed once: out = x W^T + bias.
 *
 * Layout, the same at every level, so that processes share packed weights. Outputs are in panels of
 * 16. The number of panels is rounded up to 2, ins to 32 (rotated: to 64); what is added is zeros.
 *   float32   [panel][ins][16]
 *   bfloat16  [panel][ins / 2][16][2]
 *   8 bit and 4 bit  [panel / 2][ins / 32] blocks: one stream of memory for 32 outputs. A block is
 *     8 bit   [panel % 2][8][16][4] unsigned bytes
 *     4 bit   [panel % 2][4][16][4] bytes; the low halves are inputs 8 i .. 8 i + 3, the high
 * halves the next 4: two whole lines of the 8-bit layout scales  [32], float16 or float32 minima
 * [32] of the same type, in some formats
 *   rotated   [panel / 2]: [ins / 4][32][4] unsigned bytes, then scales [32] in float32
 *
 * Arithmetic: the bits of an output depend on its row of x and its weights alone, not on the other
 * rows, their number, the threads or the level.
 *   float32, bfloat16: one chain of FMAs over the inputs in rising order, starting from 0; + bias.
 *   bfloat16 with numerics amx: activations rounded to bfloat16, the sums of TDPBF16PS; + bias.
 * These are the bits of processors with AMX. 8 and 4 bit, w = scale * (value - offset) + minimum in
 * blocks of 32 inputs: activations are quantised block by block (below), the sum of a block is
 * exact in int32. In rising order of the blocks acc = fma(fma((float)sum((value - offset) * a),
 * scale, 0), a_scale, acc) acc = fma(minimum, a_scale * (float)sum(a), acc)     where there are
 * minima and at last acc + bias. Activations of a block: m = max|x|, a_scale = m / 127, a = x * (1
 * / a_scale) rounded to the nearest integer, ties to even. Where m < 2^-100, a_scale and all a are
 * 0. Where a value is infinite or NaN, a_scale is NaN and all a are 0.
 *   rotated: the row of x is rotated: in blocks of `rotation` inputs, for s = 1, 2, 4, ... inputs
 * i and i + s become their sum and difference. m = max|x|, at least 2^-100; a = x * (127 / m)
 * rounded as above, a_scale = m / 127, or NaN and 0 as above. An output is
 * ((float)sum((value - 128) * a) * a_scale) * scale + bias, where the sum is exact in int32: tiles,
 * vectors and any order give the same bits. The same format as paceline/kernels/rotated.py. */
#ifndef PACELINE_LINEAR_H
#define PACELINE_LINEAR_H

#include <stdint.h>

#include "check.h"
#include "limits.h"

enum { LINEAR_F32, LINEAR_BF16, LINEAR_Q8, LINEAR_Q4, LINEAR_ROTATED };

typedef struct {
  int64_t outs, ins, format;
  const void *values; /* packed, at a multiple of 64 bytes */
  int64_t minima;     /* whether blocks have minima */
  int64_t scales_f16; /* scales and minima are float16, else float32 */
  int64_t offset;     /* subtracted from stored values: 128 (8 bit), 8 or 0 */
  int64_t rotation;   /* inputs that are rotated together, a power of two; 0: not rotated */
  const float *bias;  /* [outs] or null */
  int64_t tiles_bf16; /* numerics amx: products with bfloat16 weights are in tiles, which are
                       * emulated where the processor has none */
} Matrix;

/* x is [rows, ins], out [rows, outs], both dense. First every piece of the preparation, then every
 * piece of the product, in any order and on any threads. */
int64_t linear_scratch(const Matrix *m, int64_t rows);       /* bytes of prepared activations */
int64_t linear_prepare_items(const Matrix *m, int64_t rows); /* 0: x is used as it is */
void linear_prepare(const Matrix *m, const float *x, int64_t rows, void *scratch, int64_t item);
int64_t linear_items(const Matrix *m, int64_t rows);
void linear_item(const Matrix *m, const float *x, const void *scratch, int64_t rows, float *out,
                 int64_t item);

/* The whole product on the threads of OpenMP. */
void paceline_linear(const Matrix *m, const float *x, int64_t rows, void *scratch, float *out);

/* One row of the weights: ins floats; and several, on the threads of OpenMP. */
void linear_row(const Matrix *m, int64_t row, float *out);
void paceline_rows(const Matrix *m, const int64_t *rows, int64_t count, float *out);

static inline void check_matrix(const Matrix *m) {
  CHECK(m && m->outs > 0 && m->ins > 0);
  CHECK(m->format >= LINEAR_F32 && m->format <= LINEAR_ROTATED);
  CHECK(m->values && (uintptr_t)m->values % 64 == 0);
  CHECK(m->format == LINEAR_Q8 || m->format == LINEAR_Q4 || (!m->minima && !m->offset));
  CHECK(!m->rotation == (m->format != LINEAR_ROTATED));
  CHECK(!m->rotation || (m->ins <= MAX_ROTATED_INS && m->ins % m->rotation == 0));
  CHECK(m->rotation <= MAX_ROTATION && !(m->rotation & (m->rotation - 1)));
  (void)m;
}

/* Whether one thread is faster: waking others takes longer than they save, as in a draft. */
static inline int little_work(int64_t rows, int64_t weights) {
  return rows <= 16 && weights <= 1 << 24;
}

#endif
