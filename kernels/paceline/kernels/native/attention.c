/* Tree attention: every row sees a committed prefix, its ancestors in the tree, and itself.
 *
 * What fixes the bits of a row, whatever else is in the batch:
 * - A score is a sum over the head's dimensions, one after the other, for one key and one row.
 * - Scores of a row lie in the order of positions: first the prefix, then the row's own path,
 *   picked out of the tree. From here on nothing tells a tree from committed text.
 * - Weights are relative to the row's largest score, which has no order.
 * - Weighted values and weights are added up position after position, anew in each chunk of CHUNK
 *   positions counted from 0, and the chunks one after the other. A position that a row does not
 *   see has weight exactly 0 and changes nothing. */
#include <stdlib.h>

#include "vectors.h"

#define CHUNK 256
#define KEYS 32  /* keys of a tile of scores */
#define ROWS 4   /* rows worked on at once */
#define WIDE (LANES == 16 ? 4 : 2) /* vectors of values worked on at once: sums fit the registers */
#define SMALL_WORK 200000 /* products below which waking another thread costs more */

typedef struct {
  int64_t sequence, start, length, row; /* `row` is the block's first among all packed rows */
  const int32_t *depths;                /* [length]; null for a chain */
  const int32_t *paths;                 /* ancestors of every node and itself, root first ... */
  const int32_t *path_starts;           /* ... [length + 1] */
} Block;

typedef struct {
  int64_t q_heads, kv_heads, dim, window; /* window 0: none */
  int64_t q_bf16, kv_bf16, out_bf16;
  int64_t blocks;
  const Block *block;
  int64_t tiles;
  const int64_t *tile; /* [tiles, 3]: block, first node and number of nodes, for one thread each */
  float scale;
} Plan;

/* Notes what node `node` of block `block` looks at in its prefix: out [kv head][prefix position], at
 * `stride`, gets the sum over the head's query rows of scores, or of their weights. A kv head of a
 * node lies in one tile, so that nobody else writes there. */
typedef struct {
  int64_t block, node, weights, stride;
  float *out;
} Probe;

typedef struct {
  int64_t count;
  const Probe *probe;
} Probes;

typedef struct {
  float *memory;
  size_t floats;
} Scratch;

static __thread Scratch scratch;

/* Memory of this thread; what it held is lost. Null when there is none left. */
static float *take(size_t floats) {
  if (scratch.floats < floats) {
    free(scratch.memory);
    scratch.floats = 0;
    scratch.memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    if (scratch.memory) scratch.floats = floats;
  }
  return scratch.memory;
}

/* KEYS keys from `slot` on as [dim][KEYS] floats; those from `stop` on are 0. */
static void transpose_keys(const Cache *k, int64_t head, int64_t slot, int64_t stop, int64_t dim,
                           int bf16, float *out) {
  const int64_t base = head * k->head_stride;
  for (int64_t part = 0; part < KEYS; part += LANES)
    for (int64_t d = 0; d < dim; d += LANES) {
      vec x[LANES];
      for (int64_t i = 0; i < LANES; i++) {
        int64_t at = slot + part + i;
        x[i] = at < stop ? load_any(k->data, base + at * k->slot_stride + d, bf16) : splat(0.0f);
      }
      transpose(x);
      for (int64_t i = 0; i < LANES; i++) store_f32(out + (d + i) * KEYS + part, x[i]);
    }
}

/* Scores of ROWS rows (stride dim) and KEYS keys, to out (stride `stride`). */
INLINE void multiply_keys(const float *q, const float *keys, int64_t dim, float *out,
                          int64_t stride) {
  for (int64_t part = 0; part < KEYS; part += 2 * LANES) {
    vec low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++) {
      vec a = load_f32(keys + d * KEYS + part), b = load_f32(keys + d * KEYS + part + LANES);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        vec x = splat(q[r * dim + d]);
        low[r] = fma_(x, a, low[r]);
        high[r] = fma_(x, b, high[r]);
      }
    }
    for (int r = 0; r < ROWS; r++) {
      store_f32(out + r * stride + part, low[r]);
      store_f32(out + r * stride + part + LANES, high[r]);
    }
  }
}

/* Scores of slots first .. stop of all rows, to column slot - first of `out`. */
static void score(const float *q, int64_t rows, const Cache *k, int64_t head, int64_t first,
                  int64_t stop, int64_t dim, int bf16, float *keys, float *out, int64_t stride) {
  for (int64_t slot = first; slot < stop; slot += KEYS) {
    transpose_keys(k, head, slot, stop, dim, bf16, keys);
    for (int64_t r = 0; r < rows; r += ROWS)
      multiply_keys(q + r * dim, keys, dim, out + r * stride + (slot - first), stride);
  }
}

/* Turn the scores in columns from .. to of a row into weights; all other columns get 0. Returns
 * the largest score. */
static float weigh(float *row, int64_t from, int64_t to, int64_t columns) {
  for (int64_t c = 0; c < from; c++) row[c] = -INFINITY;
  for (int64_t c = to; c < columns; c++) row[c] = -INFINITY;
  vec most = splat(-INFINITY);
  for (int64_t c = from / LANES * LANES; c < to; c += LANES) most = max_(most, load_f32(row + c));
  float lanes[LANES], peak = -INFINITY;
  store_f32(lanes, most);
  for (int l = 0; l < LANES; l++) peak = lanes[l] > peak ? lanes[l] : peak;
  for (int64_t c = 0; c < columns; c += LANES)
    store_f32(row + c, exp_(load_f32(row + c) - splat(peak)));
  return peak;
}

/* sums += weights times values, for ROWS rows, `count` slots and VECTORS vectors of the values from
 * element `at` on. With MASS, each row's sum of weights is added up too, in every lane of the vector
 * `mass` elements behind its sums. */
#define WEIGHTED(name, VECTORS, MASS)                                                             \
  INLINE void name(const float *weights, int64_t stride, const Cache *v, int64_t at,              \
                   int64_t count, int bf16, float *sums, int64_t width, int64_t mass) {           \
    vec sum[ROWS][VECTORS], total[ROWS];                                                          \
    for (int r = 0; r < ROWS; r++) {                                                              \
      if (MASS) total[r] = load_f32(sums + r * width + mass);                                     \
      for (int i = 0; i < VECTORS; i++) sum[r][i] = load_f32(sums + r * width + i * LANES);       \
    }                                                                                             \
    for (int64_t s = 0; s < count; s++, at += v->slot_stride) {                                   \
      vec x[VECTORS];                                                                             \
      for (int i = 0; i < VECTORS; i++) x[i] = load_any(v->data, at + i * LANES, bf16);           \
      for (int r = 0; r < ROWS; r++) {                                                            \
        vec w = splat(weights[r * stride + s]);                                                   \
        for (int i = 0; i < VECTORS; i++) sum[r][i] = fma_(w, x[i], sum[r][i]);                   \
        if (MASS) total[r] = total[r] + w;                                                        \
      }                                                                                           \
    }                                                                                             \
    for (int r = 0; r < ROWS; r++) {                                                              \
      if (MASS) store_f32(sums + r * width + mass, total[r]);                                     \
      for (int i = 0; i < VECTORS; i++) store_f32(sums + r * width + i * LANES, sum[r][i]);       \
    }                                                                                             \
  }
WEIGHTED(weighted_first, WIDE, 1)
WEIGHTED(weighted_wide, WIDE, 0)
WEIGHTED(weighted_rest, 1, 0)
WEIGHTED(weighted_only, 1, 1)

/* The same for all `dim` values of a row, with the sum of the weights behind them. */
INLINE void add_values(const float *weights, int64_t stride, const Cache *v, int64_t at,
                       int64_t count, int64_t dim, int bf16, float *sums, int64_t width) {
  int64_t d = 0;
  if (dim < WIDE * LANES)
    weighted_only(weights, stride, v, at, count, bf16, sums, width, dim), d = LANES;
  else
    weighted_first(weights, stride, v, at, count, bf16, sums, width, dim), d = WIDE * LANES;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
    weighted_wide(weights, stride, v, at + d, count, bf16, sums + d, width, 0);
  for (; d < dim; d += LANES)
    weighted_rest(weights, stride, v, at + d, count, bf16, sums + d, width, 0);
}

/* Close a chunk: total += sums, sums = 0. */
INLINE void close_chunk(float *total, float *sums, int64_t floats) {
  for (int64_t i = 0; i < floats; i += LANES) {
    store_f32(total + i, load_f32(total + i) + load_f32(sums + i));
    store_f32(sums + i, splat(0.0f));
  }
}

typedef struct {
  int64_t rows, padded, group, base, prefix, columns, stride, width;
  float *q, *keys, *scores, *tree, *sums, *total, *peaks;
} Tile;

static void load_queries(const Plan *p, const Block *b, int64_t head, int64_t node, const void *q,
                         const Tile *t) {
  for (int64_t r = 0; r < t->padded; r++) {
    int64_t row = r < t->rows ? r : t->rows - 1;
    int64_t from = ((b->row + node + row / t->group) * p->q_heads + head * t->group +
                    row % t->group) * p->dim;
    for (int64_t d = 0; d < p->dim; d += LANES)
      store_f32(t->q + r * p->dim + d, load_any(q, from + d, (int)p->q_bf16) * splat(p->scale));
  }
}

/* Adds `scale` times a row of scores or weights to the probes of node n, where they want that kind.
 * Positions before the row's first column hold `before`. */
static void note(const Probes *probes, int64_t weights, const Plan *p, const Block *b, int64_t n,
                 int64_t head, const Tile *t, int64_t r, float scale, float before) {
  for (int64_t i = 0; i < probes->count; i++) {
    const Probe *probe = probes->probe + i;
    if (p->block + probe->block != b || probe->node != n || probe->weights != weights) continue;
    float *out = probe->out + head * probe->stride;
    const float *row = t->scores + r * t->stride - t->base;
    if (r % t->group == 0) memset(out, 0, (size_t)b->start * sizeof(float));
    for (int64_t at = 0; at < t->base && at < b->start; at++) out[at] += before;
    for (int64_t at = t->base; at < b->start; at++) out[at] += scale * row[at];
  }
}

/* Nodes node .. node + nodes of block b for one kv head. Returns 0, or 1 without memory. */
static int attend_tile(const Plan *p, const Block *b, int64_t head, int64_t node, int64_t nodes,
                       const Cache *k, const Cache *v, const void *q, void *out, float *lse,
                       const Probes *probes) {
  const int chain = b->depths == NULL;
  const int kv_bf16 = (int)p->kv_bf16;
  const int64_t dim = p->dim;
  int64_t least = b->start, deepest = 0;
  for (int64_t n = node; n < node + nodes; n++) {
    int64_t depth = chain ? n : b->depths[n];
    if (n == node || b->start + depth < least) least = b->start + depth;
    if (depth > deepest) deepest = depth;
  }
  Tile t = {.rows = nodes * (p->q_heads / p->kv_heads), .group = p->q_heads / p->kv_heads};
  t.padded = (t.rows + ROWS - 1) / ROWS * ROWS;
  int64_t first = p->window && least >= p->window ? least - p->window + 1 : 0;
  if (!chain && first > b->start) first = b->start; /* paths begin there, however short the window */
  t.base = first / CHUNK * CHUNK;
  t.prefix = chain ? b->start + node + nodes : b->start; /* slots that are their own position */
  t.columns = (b->start + deepest + 1 - t.base + KEYS - 1) / KEYS * KEYS;
  t.stride = t.columns + KEYS; /* a tile of scores may reach over the prefix */
  t.width = dim + WIDTH;
  const int64_t tree_columns = chain ? 0 : (b->length + KEYS - 1) / KEYS * KEYS;
  const size_t sums = (size_t)(t.padded * t.width);
  float *memory = take((size_t)(t.padded * (dim + t.stride + tree_columns)) + (size_t)(KEYS * dim) +
                       2 * sums + (size_t)t.padded);
  if (!memory) return 1;
  t.q = memory;
  t.keys = t.q + t.padded * dim;
  t.scores = t.keys + KEYS * dim;
  t.tree = t.scores + t.padded * t.stride;
  t.sums = t.tree + t.padded * tree_columns;
  t.total = t.sums + sums;
  t.peaks = t.total + sums;
  memset(t.sums, 0, 2 * sums * sizeof(float));

  load_queries(p, b, head, node, q, &t);
  score(t.q, t.padded, k, head, t.base, t.prefix, dim, kv_bf16, t.keys, t.scores, t.stride);
  if (!chain)
    score(t.q, t.padded, k, head, b->start, b->start + b->length, dim, kv_bf16, t.keys, t.tree,
          tree_columns);

  for (int64_t r = 0; r < t.padded; r++) {
    int64_t n = node + (r < t.rows ? r : t.rows - 1) / t.group;
    int64_t at = b->start + (chain ? n : b->depths[n]);
    float *row = t.scores + r * t.stride;
    if (!chain) {
      const int32_t *path = b->paths + b->path_starts[n];
      int64_t count = b->path_starts[n + 1] - b->path_starts[n];
      for (int64_t i = 0; i < count; i++)
        row[b->start - t.base + i] = t.tree[r * tree_columns + path[i]];
    }
    int64_t from = p->window && at >= p->window ? at - p->window + 1 - t.base : 0;
    if (r < t.rows && probes->count) {
      for (int64_t c = 0; c < from; c++) row[c] = -INFINITY;
      note(probes, 0, p, b, n, head, &t, r, 1.0f, -INFINITY);
    }
    t.peaks[r] = weigh(row, from, at + 1 - t.base, t.columns);
  }

  const int64_t values = head * v->head_stride;
  for (int64_t slot = t.base; slot < t.prefix;) {
    int64_t end = (slot / CHUNK + 1) * CHUNK;
    int64_t stop = end < t.prefix ? end : t.prefix;
    for (int64_t r = 0; r < t.padded; r += ROWS) {
      float *sum = t.sums + r * t.width;
      add_values(t.scores + r * t.stride + slot - t.base, t.stride, v,
                 values + slot * v->slot_stride, stop - slot, dim, kv_bf16, sum, t.width);
      if (stop == end) close_chunk(t.total + r * t.width, sum, ROWS * t.width);
    }
    slot = stop;
  }

  for (int64_t r = 0; r < t.rows; r++) {
    int64_t n = node + r / t.group;
    float *sum = t.sums + r * t.width, *total = t.total + r * t.width;
    if (!chain) {
      const int32_t *path = b->paths + b->path_starts[n];
      int64_t count = b->path_starts[n + 1] - b->path_starts[n];
      const float *weights = t.scores + r * t.stride + b->start - t.base;
      for (int64_t i = 0; i < count; i++) {
        vec w = splat(weights[i]);
        int64_t at = values + (b->start + path[i]) * v->slot_stride;
        for (int64_t d = 0; d < dim; d += LANES)
          store_f32(sum + d, fma_(w, load_any(v->data, at + d, kv_bf16), load_f32(sum + d)));
        store_f32(sum + dim, load_f32(sum + dim) + w);
        if ((b->start + i + 1) % CHUNK == 0) close_chunk(total, sum, t.width);
      }
    }
    close_chunk(total, sum, t.width);
    int64_t to = (b->row + n) * p->q_heads + head * t.group + r % t.group;
    const vec mass = load_f32(total + dim);
    for (int64_t d = 0; d < dim; d += LANES)
      store_any(out, to * dim + d, (int)p->out_bf16, load_f32(total + d) / mass);
    if (lse) lse[to] = t.peaks[r] + logf(total[dim]);
    if (probes->count) note(probes, 1, p, b, n, head, &t, r, 1.0f / total[dim], 0.0f);
  }
  return 0;
}

/* Attention of all packed rows. q [M, Hq, D] and out [M, Hq, D] dense, lse [M, Hq] or null.
 * Returns 0, or 1 when memory ran out. */
int64_t paceline_attend(const Plan *p, const Cache *keys, const Cache *values, const void *q,
                        void *out, float *lse, const Probes *probes) {
  int64_t failed = 0, work = 0;
  for (int64_t i = 0; i < p->blocks; i++)
    work += p->block[i].length * p->q_heads * (p->block[i].start + p->block[i].length) * p->dim;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed) if (work > SMALL_WORK)
  for (int64_t i = 0; i < p->tiles * p->kv_heads; i++) {
    const int64_t *tile = p->tile + i / p->kv_heads * 3;
    const Block *b = p->block + tile[0];
    failed |= attend_tile(p, b, i % p->kv_heads, tile[1], tile[2], keys + b->sequence,
                          values + b->sequence, q, out, lse, probes);
  }
  return failed;
}
