/* The instructions for tiles in plain C, under the names of the intrinsics: included before the
 * kernels, it lets processors without tiles run the code for them. Tiles have the shapes of the
 * configuration; without one, a use of tiles ends the process, as the instruction would. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} EmulatedShapes;

static __thread EmulatedShapes emulated_shapes;
static __thread uint8_t emulated_tile[8][16][64];

static inline void emulated_load_shapes(const void *shapes) {
  memcpy(&emulated_shapes, shapes, sizeof emulated_shapes);
  memset(emulated_tile, 0, sizeof emulated_tile);
}

static inline void emulated_store_shapes(void *shapes) {
  memcpy(shapes, &emulated_shapes, sizeof emulated_shapes);
}

static inline void emulated_check(int tile) {
  if (emulated_shapes.palette != 1 || !emulated_shapes.rows[tile]) abort();
}

static inline void emulated_zero(int tile) {
  emulated_check(tile);
  memset(emulated_tile[tile], 0, sizeof emulated_tile[tile]);
}

static inline void emulated_load(int tile, const void *base, int64_t stride) {
  emulated_zero(tile);
  for (int row = 0; row < emulated_shapes.rows[tile]; row++)
    memcpy(emulated_tile[tile][row], (const char *)base + row * stride,
           emulated_shapes.row_bytes[tile]);
}

static inline void emulated_store(int tile, void *base, int64_t stride) {
  emulated_check(tile);
  for (int row = 0; row < emulated_shapes.rows[tile]; row++)
    memcpy((char *)base + row * stride, emulated_tile[tile][row], emulated_shapes.row_bytes[tile]);
}

/* Adds what `dot` says of four bytes of a and of b to each 32 bits of c. */
static inline void emulated_dots(int c, int a, int b,
                                 uint32_t (*dot)(uint32_t, const uint8_t *, const uint8_t *)) {
  emulated_check(a), emulated_check(b), emulated_check(c);
  for (int m = 0; m < emulated_shapes.rows[c]; m++)
    for (int n = 0; n < emulated_shapes.row_bytes[c] / 4; n++)
      for (int k = 0; k < emulated_shapes.row_bytes[a] / 4; k++) {
        uint32_t sum;
        memcpy(&sum, &emulated_tile[c][m][4 * n], 4);
        sum = dot(sum, &emulated_tile[a][m][4 * k], &emulated_tile[b][k][4 * n]);
        memcpy(&emulated_tile[c][m][4 * n], &sum, 4);
      }
}

static inline uint32_t emulated_signed_unsigned(uint32_t sum, const uint8_t *a, const uint8_t *b) {
  for (int i = 0; i < 4; i++) sum += (uint32_t)((int8_t)a[i] * (int32_t)b[i]);
  return sum;
}

static inline float emulated_bf16(const uint8_t *bytes) {
  const uint32_t bits = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t emulated_bf16_pair(uint32_t sum, const uint8_t *a, const uint8_t *b) {
  float x;
  memcpy(&x, &sum, 4);
  for (int i = 0; i < 4; i += 2) x = fmaf(emulated_bf16(a + i), emulated_bf16(b + i), x);
  memcpy(&sum, &x, 4);
  return sum;
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_load_shapes
#define _tile_storeconfig emulated_store_shapes
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_zero emulated_zero
#define _tile_dpbsud(c, a, b) emulated_dots(c, a, b, emulated_signed_unsigned)
#define _tile_dpbf16ps(c, a, b) emulated_dots(c, a, b, emulated_bf16_pair)
