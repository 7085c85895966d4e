/* The two products of attention in bfloat16 tiles, for bfloat16 caches under numerics amx.
 *
 * Queries and weights are rounded to bfloat16; sums are float32. A sum over dimensions, or over the
 * positions of a chunk, is taken in steps of DOT: positions in steps counted from the chunk's
 * first. A step that holds positions of the tree is done for each node with the values of its own
 * path, so that drafted and committed tokens are treated alike. */
#ifndef PACELINE_ATTENTION_TILES_H
#define PACELINE_ATTENTION_TILES_H

#include "attention_dots.h"
#include "tiles.h"

#define WIDE 4              /* tiles of columns worked on at once */
#define WORDS (SIDE * SIDE) /* 32-bit values of a tile */

/* C [SIDE, tiles * SIDE] = A * B; A [SIDE, depth] at `stride`, B [depth / DOT][tiles][SIDE pairs]
 * [SIDE columns][2]. `tiles` is 1 or WIDE; C += A * B if `more`. */
INLINE void multiply_tiles(const int tiles, const uint16_t *a, int64_t stride, const uint32_t *b,
                           int64_t depth, int more, float *c, int64_t c_stride) {
  const int64_t a_bytes = stride * 2, c_bytes = c_stride * 4;
  /* Numbers of tiles are literals in the instructions, so these stand for loops over the tiles `t`
   * of C, 0 to `tiles` - 1: each begins as zeros or as C, takes a step of A (in tile 4) times B (in
   * tile 5), and ends in memory. */
#define EACH(CALL) \
  CALL(0);         \
  if (tiles > 1) { \
    CALL(1);       \
    CALL(2);       \
    CALL(3);       \
  }
#define BEGIN(t)                         \
  if (more) {                            \
    TILE_LOAD(t, c + t * SIDE, c_bytes); \
  } else {                               \
    TILE_ZERO(t);                        \
  }
#define STEP(t)                    \
  TILE_LOAD(5, b + t * WORDS, 64); \
  TILE_DOT_BF16(t, 4, 5)
#define END(t) TILE_STORE(t, c + t * SIDE, c_bytes)
  EACH(BEGIN)
  for (int64_t k = 0; k < depth; k += DOT, b += tiles * WORDS) {
    TILE_LOAD(4, a + k, a_bytes);
    EACH(STEP)
  }
  EACH(END)
#undef EACH
#undef BEGIN
#undef STEP
#undef END
}

INLINE int64_t tiles_at(int64_t column, int64_t columns) {
  return column + WIDE * SIDE <= columns ? WIDE : 1;
}

INLINE void multiply_any(int64_t tiles, const uint16_t *a, int64_t stride, const uint32_t *b,
                         int64_t depth, int more, float *c, int64_t c_stride) {
  if (tiles == WIDE)
    multiply_tiles(WIDE, a, stride, b, depth, more, c, c_stride);
  else
    multiply_tiles(1, a, stride, b, depth, more, c, c_stride);
}

/* `tiles` times SIDE keys from `slot` on, as B of a product over dimensions. The last key before
 * `stop` stands in for those behind it. */
static void pack_keys(const Tile *t, int64_t slot, int64_t stop, int64_t tiles, float *out) {
  const int64_t pairs = t->plan->dim / 2;
  for (int64_t k = 0; k < round_up(pairs, SIDE); k += LANES)
    for (int64_t n = 0; n < tiles * SIDE; n += LANES) {
      float *to = out + (k / SIDE * tiles + n / SIDE) * WORDS + k % SIDE * SIDE + n % SIDE;
      vec x[LANES];
      for (int64_t i = 0; i < LANES; i++) {
        const uint16_t *key = (const uint16_t *)t->k->data + t->head * t->k->head_stride +
                              min(slot + n + i, stop - 1) * t->k->slot_stride;
        __builtin_prefetch((const char *)(key + 2 * k) + KEYS_AHEAD, 0, 2);
        x[i] = load_part((const float *)(key + 2 * k), max(0, pairs - k));
      }
      transpose(x);
      for (int64_t i = 0; i < LANES; i++) store_f32(to + i * SIDE, x[i]);
    }
}

/* Whether keys are A tiles as they lie, and queries are B: then scores are turned, and else keys,
 * which are more if there are few rows. */
INLINE int turned(const Tile *t) {
  return t->plan->dim % DOT == 0 && round_up(t->rows, SIDE) / SIDE <= t->plan->dim / DOT;
}

/* Where the queries are as B, behind those in rows: [tile of rows][dim / DOT][SIDE pairs][SIDE]. */
INLINE uint32_t *turned_queries(const Tile *t, const Buffers *m) {
  return (uint32_t *)m->q + round_up(t->rows, SIDE) * t->plan->dim / 2;
}

/* x[i][j] becomes x[j][i], for one tile; to `stride` words a row. */
static void turn_tile(const float *x, int64_t x_stride, int64_t rows, float *out, int64_t stride) {
#if LANES == SIDE
  vec row[SIDE];
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) row[i] = load_f32(x + i * x_stride);
  transpose(row);
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++)
    if (i < rows) store_f32(out + i * stride, row[i]);
#else
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < SIDE; j++) memcpy(out + i * stride + j, x + j * x_stride + i, 4);
#endif
}

static void turn_queries(const Tile *t, const Buffers *m) {
  const int64_t words = t->plan->dim / 2;
  float *to = (float *)turned_queries(t, m);
  for (int64_t r = 0; r < t->rows; r += SIDE)
    for (int64_t k = 0; k < words; k += SIDE, to += WORDS)
      turn_tile(m->q + r * words + k, words, SIDE, to, SIDE);
}

/* Scores of WIDE tiles of keys from `slot` on. */
static void score_turned(const Tile *t, const Buffers *m, int64_t slot, float *out,
                         int64_t stride) {
  const int64_t dim = t->plan->dim, bytes = t->k->slot_stride * 2, tile = bytes * SIDE;
  const char *keys = row_at(t, t->k, KV_BF16, slot);
  const uint32_t *queries = turned_queries(t, m);
  _Alignas(64) float scores[WIDE][WORDS];
  for (int64_t i = 0; i < WIDE * SIDE; i++) fetch_row(keys + i * bytes + KEYS_AHEAD, dim * 2, 3);
  for (int64_t r = 0; r < t->rows; r += SIDE) {
    ZERO_SUMS;
    for (int64_t d = 0; d < dim; d += DOT, queries += WORDS) {
      const char *key = keys + d * 2;
      TILE_LOAD(5, queries, 64);
      TILE_LOAD(4, key, bytes);
      TILE_DOT_BF16(0, 4, 5);
      TILE_LOAD(4, key + tile, bytes);
      TILE_DOT_BF16(1, 4, 5);
      TILE_LOAD(4, key + 2 * tile, bytes);
      TILE_DOT_BF16(2, 4, 5);
      TILE_LOAD(4, key + 3 * tile, bytes);
      TILE_DOT_BF16(3, 4, 5);
    }
    TILE_STORE(0, scores[0], 64);
    TILE_STORE(1, scores[1], 64);
    TILE_STORE(2, scores[2], 64);
    TILE_STORE(3, scores[3], 64);
    for (int i = 0; i < WIDE; i++)
      turn_tile(scores[i], SIDE, min(SIDE, t->rows - r), out + r * stride + i * SIDE, stride);
  }
}

/* Scores of slots first .. stop of all rows, to column slot - first of `out`. */
static void score_tiles(const Tile *t, const Buffers *m, int64_t first, int64_t stop, float *out,
                        int64_t stride) {
  const int64_t depth = round_up(t->plan->dim, DOT);
  const uint16_t *q = (const uint16_t *)m->q;
  int64_t slot = first;
  for (; turned(t) && slot + WIDE * SIDE <= stop; slot += WIDE * SIDE)
    score_turned(t, m, slot, out + (slot - first), stride);
  for (int64_t tiles; slot < stop; slot += tiles * SIDE) {
    tiles = tiles_at(slot, round_up(stop - first, SIDE) + first);
    pack_keys(t, slot, stop, tiles, m->panel);
    for (int64_t r = 0; r < t->rows; r += SIDE)
      multiply_any(tiles, q + r * depth, depth, (const uint32_t *)m->panel, depth, 0,
                   out + r * stride + (slot - first), stride);
  }
}

/* Values of `count` slots, filled up with 0 to `depth`, as B of products over positions: one after
 * the other for the columns that multiply_rows_tiles works on at once. */
static void pack_values(const Tile *t, const int64_t *slots, int64_t count, int64_t depth,
                        uint32_t *out) {
  static const uint16_t zero[WIDE * SIDE];
  CHECK(count <= depth && depth <= CHUNK && depth % DOT == 0);
  const uint16_t *base = (const uint16_t *)t->v->data + t->head * t->v->head_stride;
  for (int64_t d = 0, tiles; d < t->plan->dim; d += tiles * SIDE) {
    tiles = tiles_at(d, t->plan->dim);
    for (int64_t s = 0; s < depth; s += 2) {
      const uint16_t *low = s < count ? base + slots[s] * t->v->slot_stride + d : zero;
      const uint16_t *high = s + 1 < count ? base + slots[s + 1] * t->v->slot_stride + d : zero;
      uint32_t *to = out + s / DOT * tiles * WORDS + s / 2 % SIDE * SIDE;
      if (s < count) {
        fetch_row((const char *)low + KEYS_AHEAD, tiles * SIDE * 2, 3);
        fetch_row((const char *)high + KEYS_AHEAD, tiles * SIDE * 2, 3);
      }
#if LANES == SIDE
      vec x[WIDE];
      if (tiles == WIDE)
        pair_values(low, high, WIDE, x);
      else
        pair_values(low, high, 1, x);
      for (int64_t n = 0; n < tiles; n++) store_f32((float *)to + n * WORDS, x[n]);
#else
      for (int64_t i = 0; i < tiles * SIDE; i++)
        to[i / SIDE * WORDS + i % SIDE] = low[i] | (uint32_t)high[i] << 16;
#endif
    }
    out += depth * tiles * SIDE / 2;
  }
}

/* Weighted values of rows r .. end of a chunk, whose weights are bfloat16, from its column `first`
 * on; added to `part` if `more`. */
static void weigh_rows(const Tile *t, const Buffers *m, int64_t r, int64_t end, int64_t first,
                       int64_t depth, int more, float *part) {
  CHECK(end <= t->rows && first + depth <= CHUNK);
  for (; r < end; r += SIDE) {
    const int64_t rows = min(SIDE, end - r), whole = rows == SIDE;
    const uint16_t *a = (const uint16_t *)(m->scores + r * STRIDE) + first;
    const uint32_t *b = (const uint32_t *)m->panel;
    _Alignas(64) float c[SIDE * SIDE * WIDE];
    for (int64_t d = 0, tiles; d < t->plan->dim; d += tiles * SIDE) {
      float *to = part + r * t->width + d;
      tiles = tiles_at(d, t->plan->dim);
      for (int64_t i = 0; more && !whole && i < rows; i++)
        memcpy(c + i * SIDE * WIDE, to + i * t->width, (size_t)(tiles * SIDE) * 4);
      multiply_any(tiles, a, 2 * STRIDE, b, depth, more, whole ? to : c,
                   whole ? t->width : SIDE * WIDE);
      for (int64_t i = 0; !whole && i < rows; i++)
        memcpy(to + i * t->width, c + i * SIDE * WIDE, (size_t)(tiles * SIDE) * 4);
      b += depth * tiles * SIDE / 2;
    }
  }
}

/* Weighted values of the chunk from `base` on: the prefix up to `stop`, then every row's path. */
static void weigh_tiles(const Tile *t, const Buffers *m, int64_t base, int64_t stop, float *part) {
  const QueryBlock *b = t->block;
  const int64_t count = b->depths && stop < base + CHUNK ? (stop - base) / DOT * DOT : stop - base;
  int64_t slots[CHUNK];
  CHECK(stop >= base && stop <= base + CHUNK);
  for (int64_t i = 0; i < stop - base; i++) slots[i] = base + i;
  pack_values(t, slots, count, round_up(count, DOT), (uint32_t *)m->panel);
  weigh_rows(t, m, 0, t->rows, 0, round_up(count, DOT), 0, part);
  for (int64_t r = 0; b->depths && r < t->rows; r += t->group) {
    const int64_t n = t->node + r / t->group, to = min(CHUNK, position(t, n) + 1 - base);
    const int32_t *path = b->paths + b->path_starts[n];
    for (int64_t i = stop - base; i < to; i++) slots[i] = b->start + path[base + i - b->start];
    if (count >= to) continue;
    pack_values(t, slots + count, to - count, round_up(to - count, DOT), (uint32_t *)m->panel);
    weigh_rows(t, m, r, r + t->group, count, round_up(to - count, DOT), 1, part);
  }
}

#endif
