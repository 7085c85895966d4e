/* Tile registers: 8 of 16 rows of 64 bytes. The instructions where the level has them, else the
 * same in plain C, which tests packing and edges on any machine. Numbers of tiles are literals. */
#ifndef PACELINE_TILES_H
#define PACELINE_TILES_H

#include "parts.h"
#include "vectors.h"

#define SIDE 16 /* rows of a tile, and 32-bit values of a row */

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

/* Tile `t` as zeros; from rows at `stride` bytes; to such rows; and c += a * b over pairs of
 * bfloat16. `t`, `a`, `b` and `c` are literals: they are parts of instructions. The other branch
 * defines the same in plain C. */
#define TILE_ZERO(t) _tile_zero(t)
/* The intrinsics for reading do not tell gcc that they read memory. */
#define WRITTEN __asm__ volatile("" ::: "memory")
#define TILE_READ(t, from, stride, rows, bytes) \
  check_tile((from), (stride), rows, bytes);    \
  WRITTEN;                                      \
  _tile_loadd(t, from, stride)
#define TILE_STORE(t, to, stride)       \
  check_tile((to), (stride), SIDE, 64); \
  _tile_stored(t, to, stride)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
/* c += a * b over four bytes, those of `a` signed and those of `b` unsigned. */
#define TILE_DOT_SIGNED(c, a, b) _tile_dpbsud(c, a, b)
/* The same of signed bytes. */
#define TILE_DOT_BYTES(c, a, b) _tile_dpbssd(c, a, b)

/* The sanitizer does not see what the instructions read and write. */
INLINE void check_tile(const void *at, int64_t stride, int rows, int bytes) {
  for (int row = 0; GAP && row < rows; row++) CHECK_MEMORY((const char *)at + row * stride, bytes);
}

/* Sets the tiles' shapes in this thread, unless they are set, for products over `depth` bytes: 64,
 * or 32 for products of signed bytes. Other libraries, such as oneDNN in
 * PyTorch, change and release them on the same threads between two calls. Setting clears all tiles
 * and takes longer than reading. Linux wants to be asked before the first use. */
INLINE void configure_tiles(const int depth) {
  static __thread int asked;
  const uint8_t lines = (uint8_t)(depth / 4);
  _Alignas(64) const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shapes = {.palette = 1,
              .row_bytes = {64, 64, 64, 64, (uint16_t)depth, (uint16_t)depth, 64, 64},
              .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, lines, lines}};
  _Alignas(64) char found[sizeof shapes];
  if (!asked) syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
  asked = 1;
  _tile_storeconfig(found);
  WRITTEN;
  if (_mm512_cmpneq_epi32_mask(_mm512_load_si512(found), _mm512_load_si512(&shapes)))
    _tile_loadconfig(&shapes);
}

#else
static __thread uint32_t tile_registers[8][SIDE][SIDE];

INLINE float from_bf16(uint32_t bits) {
  float x;
  bits <<= 16;
  memcpy(&x, &bits, sizeof x);
  return x;
}

#define TILE_ZERO(t) memset(tile_registers[t], 0, sizeof tile_registers[t])
#define TILE_READ(t, from, stride, rows, bytes)           \
  for (int64_t tile_row = 0; tile_row < rows; tile_row++) \
  memcpy(tile_registers[t][tile_row], (const char *)(from) + tile_row * (int64_t)(stride), bytes)
#define TILE_STORE(t, to, stride)                         \
  for (int64_t tile_row = 0; tile_row < SIDE; tile_row++) \
  memcpy((char *)(to) + tile_row * (int64_t)(stride), tile_registers[t][tile_row], 64)
#define TILE_DOT_BF16(c, a, b) dot_bf16(c, a, b)
#define TILE_DOT_BYTES(c, a, b) dot_bytes(c, a, b)

static inline void dot_bytes(int c, int a, int b) {
  for (int row = 0; row < SIDE; row++)
    for (int n = 0; n < SIDE; n++)
      for (int k = 0; k < 8; k++)
        for (int byte = 0; byte < 32; byte += 8)
          tile_registers[c][row][n] += (uint32_t)((int8_t)(tile_registers[a][row][k] >> byte) *
                                                  (int8_t)(tile_registers[b][k][n] >> byte));
}

/* Without the instruction's flushing of denormals. */
static inline void dot_bf16(int c, int a, int b) {
  for (int row = 0; row < SIDE; row++)
    for (int n = 0; n < SIDE; n++) {
      float even = 0.0f, odd = 0.0f, sum;
#pragma GCC unroll 1
      for (int k = 0; k < SIDE; k++) {
        const uint32_t x = tile_registers[a][row][k], y = tile_registers[b][k][n];
        even = fmaf(from_bf16(x & 0xffff), from_bf16(y & 0xffff), even);
        odd = fmaf(from_bf16(x >> 16), from_bf16(y >> 16), odd);
      }
      memcpy(&sum, &tile_registers[c][row][n], sizeof sum);
      sum += even + odd;
      memcpy(&tile_registers[c][row][n], &sum, sizeof sum);
    }
}

INLINE void configure_tiles(const int depth) {}
#endif

#define TILE_LOAD(t, from, stride) TILE_READ(t, from, stride, SIDE, 64)
/* For products of bytes over 32 inputs: 16 rows of 32 bytes, and 8 lines of 64. */
#define TILE_LOAD_ROWS(t, from, stride) TILE_READ(t, from, stride, SIDE, 32)
#define TILE_LOAD_LINES(t, from, stride) TILE_READ(t, from, stride, 8, 64)

/* Four tiles of sums, 0 to 3: of two tiles of rows, the second one only if `second`, by two of
 * outputs. They begin as zeros, take the products of a step, and end in memory. */
#define ZERO_SUMS \
  TILE_ZERO(0);   \
  TILE_ZERO(1);   \
  TILE_ZERO(2);   \
  TILE_ZERO(3)
#define ADD_PRODUCTS(DOT, x, x_stride, second, w, other, w_stride) \
  TILE_LOAD(6, w, w_stride);                                       \
  TILE_LOAD(7, other, w_stride);                                   \
  TILE_LOAD(4, x, x_stride);                                       \
  DOT(0, 4, 6);                                                    \
  DOT(1, 4, 7);                                                    \
  if (second) {                                                    \
    TILE_LOAD(5, (x) + SIDE * (x_stride), x_stride);               \
    DOT(2, 5, 6);                                                  \
    DOT(3, 5, 7);                                                  \
  }
#define STORE_SUMS(sums, columns)                      \
  TILE_STORE(0, sums, columns * 4);                    \
  TILE_STORE(1, (sums) + SIDE, columns * 4);           \
  TILE_STORE(2, (sums) + SIDE * columns, columns * 4); \
  TILE_STORE(3, (sums) + SIDE * columns + SIDE, columns * 4)

#endif
