/* Arguments of an attention call, and its tiles. */
#ifndef PACELINE_ATTENTION_H
#define PACELINE_ATTENTION_H

#include "cache_rows.h"
#include "parts.h"
#include "vectors.h"

#define STRIDE (CHUNK + WIDTH) /* of a row of scores */
#define ROWS 6                 /* rows of a tile of a product, whose sums stay in registers */
#define COLUMNS (COLUMN_VECTORS * LANES) /* its columns */
#define DEPTH 64                         /* values of a panel */
#define DOT 32 /* products summed by one tile instruction; rows of bfloat16 are padded to it */

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

typedef struct {
  int64_t sequence, start, length, row; /* `row` is the block's first among all packed rows */
  const int32_t *depths;                /* [length]; null for a chain */
  const int32_t *paths;                 /* ancestors of every node and itself, root first ... */
  const int32_t *path_starts;           /* ... [length + 1] */
} QueryBlock;

typedef struct {
  int64_t q_heads, kv_heads, dim, window; /* window 0: none */
  int64_t kv_type;                        /* KV_F32, KV_BF16 or KV_INT8 */
  int64_t products;                       /* how bfloat16 caches are multiplied: */
  int64_t blocks;
  const QueryBlock *block;
  int64_t tiles;
  const int64_t *tile; /* [tiles, 3]: block, first node and number of nodes */
  float scale, cap;    /* of scores; cap 0: none */
  const float *sinks;  /* [Hq]: one extra logit in the softmax denominator; null: none */
} Plan;

/* By numerics portable, amx and avx512_bf16. */
enum { CHAINS, TILES, DOTS };

/* Records scores of node `node` of block `block` over its prefix: out [kv head][prefix position],
 * at `stride`, gets the sum over the head's query rows of scores or weights. */
typedef struct {
  int64_t block, node, weights, stride;
  float *out;
} Probe;

typedef struct {
  int64_t count;
  const Probe *probe;
} Probes;

/* An attention call: q [M, Hq, D] and out [M, Hq, D] dense.
 *
 * One thread begins it. Then its items run, on any threads and in any order, and after all of them
 * its merge items. */
typedef struct {
  const Plan *plan;
  const Cache *keys, *values; /* by sequence */
  const Probes *probes;
  const float *q;
  float *out;
  int64_t ranges; /* items into which the chunks of a tile and head are divided; 0: one item */
  float *parts;   /* results of all chunks, if they are divided */
  float *raw;     /* scores kept for probes; both in memory of the thread that began the call */
} Attention;

/* Divides the call into items for `threads` threads. Returns 0, or 1 when memory ran out. */
int64_t attention_begin(Attention *a, int64_t threads);

int64_t attention_items(const Attention *a);

/* Returns 0, or 1 when memory ran out. */
int64_t attention_item(const Attention *a, int64_t i);

int64_t attention_merge_items(const Attention *a);
void attention_merge_item(const Attention *a, int64_t i);

/* The nodes of one tile and one kv head. A result of a row, of one chunk or of all, is `width`
 * floats: `dim` weighted values, the sum of the weights, and the largest score. */
typedef struct {
  const Plan *plan;
  const QueryBlock *block;
  const Cache *k, *v;
  Probes probes; /* from the first to the last one of the block */
  float *raw;    /* scores kept for these */
  int64_t head, node, rows, group, width;
  int64_t first, chunks; /* the first chunk that any row attends to, and one past the last */
  int64_t prefix;        /* slots that are their own position */
  int64_t tree_columns;
} Tile;

/* Scratch buffers of a thread for a tile. */
typedef struct {
  float *q, *panel, *scores, *tree, *part, *total;
} Buffers;

/* Which of the products an attention takes: caches of other types have chains of FMAs. */
INLINE int64_t products_of(const Plan *p) { return p->kv_type == KV_BF16 ? p->products : CHAINS; }

/* Position of a node. */
INLINE int64_t position(const Tile *t, int64_t n) {
  return t->block->start + (t->block->depths ? t->block->depths[n] : n);
}

/* The row of a slot in one of the tile's caches. */
INLINE const char *row_at(const Tile *t, const Cache *c, const int type, int64_t slot) {
  return (const char *)c->data + (t->head * c->head_stride + slot * c->slot_stride) * kv_size(type);
}

/* Index of a row of the tile in [M, Hq]. */
INLINE int64_t packed_row(const Tile *t, int64_t r) {
  return (t->block->row + t->node + r / t->group) * t->plan->q_heads + t->head * t->group +
         r % t->group;
}

#endif
