/* Tree attention: every row attends to a committed prefix, its ancestors in the tree, and itself.
 *
 * Keys are read chunk by chunk, each once for all rows of a tile. The order of operations fixes the
 * bits of a row in any batch and with any number of threads:
 * - A score is one chain of FMAs over the head's dimensions.
 * - Chunks are CHUNK positions, counted from 0. A row's scores of a chunk are in the order of
 *   positions: first the prefix, then the row's own path, gathered from the tree. From there on,
 *   drafted and committed tokens are treated alike.
 * - Weights of a chunk are relative to the row's largest score in it. Weighted values are one chain
 *   of FMAs over the chunk's positions; weights are summed in WIDTH partial sums.
 * - The results of the chunks are merged one after the other. A hidden position has weight exactly
 * 0 and changes nothing; a chunk without visible positions is skipped. Keys and values in 8 bits
 * are multiplied as whole numbers. The scale of a key multiplies its scores, that of a value its
 * weights. attention_tiles.h takes the two products in another order, with the same property. */
#include <stdlib.h>

#include "attention.h"
#include "attention_dots.h"
#include "attention_tiles.h"
#include "softmax.h"

#define SMALL_WORK 200000      /* products below which another thread costs more than it saves */
#define SPLIT_ITEMS 4          /* items per thread below which the chunks of an item are split */
#define MERGED 4               /* nodes whose chunks one item merges */
#define SPLIT_BYTES (16 << 20) /* most memory for the results of chunks that are merged later */

typedef struct {
  void *memory;
  int64_t bytes;
} Scratch;

static __thread Scratch own, shared;

/* Scratch memory of this thread, with undefined content. Null when out of memory. */
static void *take(Scratch *scratch, int64_t bytes) {
  if (scratch->bytes < bytes) {
    free(scratch->memory);
    scratch->memory = aligned_alloc(64, (size_t)round_up(bytes, 64));
    scratch->bytes = scratch->memory ? bytes : 0;
  }
  ALLOW(scratch->memory, scratch->bytes);
  return scratch->memory;
}

/* Floats of the scores of one query head that are kept for a probe, until their largest is known.
 */
static int64_t kept_row(const Plan *p, const Probe *probe) {
  return probe->weights ? round_up(p->block[probe->block].start, WIDTH) : 0;
}

/* Bytes of the scores that are kept for all probes. */
static int64_t kept_bytes(const Plan *p, const Probes *probes) {
  int64_t floats = 0;
  for (int64_t i = 0; i < probes->count; i++) floats += p->q_heads * kept_row(p, probes->probe + i);
  return floats * (int64_t)sizeof(float);
}

/* Records scores of one row and chunk for its probes; hidden positions get -inf. */
static void note(const Tile *t, const float *row, int64_t r, int64_t base, int64_t from,
                 int64_t to) {
  const int64_t start = t->block->start, stop = min(base + CHUNK, start);
  const int64_t head = t->head * t->group + r % t->group;
  float *raw = t->raw;
  for (int64_t i = 0; i < t->probes.count; i++) {
    const Probe *probe = t->probes.probe + i;
    float *out = probe->weights ? raw + head * kept_row(t->plan, probe)
                                : probe->out + t->head * probe->stride;
    raw += t->plan->q_heads * kept_row(t->plan, probe);
    if (t->plan->block + probe->block != t->block || probe->node != t->node + r / t->group)
      continue;
    const int add = !probe->weights && r % t->group;
    CHECK(probe->weights || t->plan->kv_heads == 1 || stop <= probe->stride);
    for (int64_t at = base; at < stop; at++) {
      const float x = at - base >= from && at - base < to ? row[at - base] : -INFINITY;
      out[at] = add ? out[at] + x : x;
    }
  }
}

/* Writes the part of a probe that lies before the first chunk, and weights made of kept scores. */
static void finish_probe(const Tile *t, const Probe *probe, float *kept, const float *total) {
  const int64_t dim = t->plan->dim, start = t->block->start, stride = kept_row(t->plan, probe);
  const int64_t before = min(t->first * CHUNK, start);
  float *out = probe->out + t->head * probe->stride;
  CHECK(t->plan->kv_heads == 1 || start <= probe->stride);
  for (int64_t at = 0; at < before; at++) out[at] = probe->weights ? 0.0f : -INFINITY;
  if (!probe->weights) return;
  for (int64_t g = 0; g < t->group; g++) {
    float *raw = kept + (t->head * t->group + g) * stride;
    const float *row = total + ((probe->node - t->node) * t->group + g) * t->width;
    const vec peak = splat(row[dim + 1]), sum = splat(row[dim]);
    for (int64_t at = before; at < start; at += LANES)
      store_f32(raw + at, exp_(load_f32(raw + at) - peak) / sum);
    for (int64_t at = before; at < start; at++) out[at] = g ? out[at] + raw[at] : raw[at];
  }
}

static void finish_probes(const Tile *t, const float *total) {
  float *raw = t->raw;
  for (int64_t i = 0; i < t->probes.count; i++) {
    const Probe *probe = t->probes.probe + i;
    const int64_t node = probe->node - t->node;
    if (t->plan->block + probe->block == t->block && node >= 0 && node * t->group < t->rows)
      finish_probe(t, probe, raw, total);
    raw += t->plan->q_heads * kept_row(t->plan, probe);
  }
}

/* Gives a tile the probes of its block, so that those of other blocks cost its rows nothing. */
static void take_probes(const Attention *a, Tile *t) {
  const Probe *probe = a->probes->probe;
  t->raw = a->raw;
  for (int64_t i = 0; i < a->probes->count; i++) {
    if (t->plan->block + probe[i].block == t->block) {
      if (!t->probes.count) t->probes.probe = probe + i;
      t->probes.count = probe + i + 1 - t->probes.probe;
    } else if (!t->probes.count) {
      t->raw += t->plan->q_heads * kept_row(t->plan, probe + i);
    }
  }
}

static Tile tile_of(const Attention *a, int64_t item) {
  const Plan *p = a->plan;
  const int64_t *tile = p->tile + item / p->kv_heads * 3;
  const QueryBlock *b = p->block + tile[0];
  const int64_t node = tile[1], nodes = tile[2], group = p->q_heads / p->kv_heads;
  Tile t = {.plan = p,
            .block = b,
            .k = a->keys + b->sequence,
            .v = a->values + b->sequence,
            .head = item % p->kv_heads,
            .node = node,
            .rows = nodes * group,
            .group = group,
            .width = p->dim + WIDTH};
  int64_t lowest = position(&t, node), highest = lowest;
  for (int64_t n = node; n < node + nodes; n++) {
    lowest = min(lowest, position(&t, n));
    highest = max(highest, position(&t, n));
  }
  t.first = p->window ? max(0, lowest - p->window + 1) / CHUNK : 0;
  t.chunks = highest / CHUNK + 1;
  t.prefix = b->depths ? b->start : b->start + node + nodes;
  t.tree_columns = b->depths ? round_up(b->length, COLUMNS) : 0;
  return t;
}

static float *add_floats(Parts *p, int64_t floats) {
  return add_part(p, floats * (int64_t)sizeof(float));
}

static Buffers lay_out(const Tile *t, Parts *p) {
  const int64_t dim = round_up(t->plan->dim, DOT), rows = round_up(t->rows, SIDE);
  Buffers m;
  m.q = add_floats(p, rows * dim);
  m.panel = add_floats(p, CHUNK * dim);
  m.scores = add_floats(p, (rows + SIDE) * STRIDE); /* tiles of a path begin at any row */
  m.tree = add_floats(p, rows * t->tree_columns);
  m.part = add_floats(p, t->rows * t->width);
  m.total = add_floats(p, t->rows * t->width);
  forbid_columns(m.scores, rows + SIDE, STRIDE, CHUNK);
  forbid_columns(m.part, t->rows, t->width, t->plan->dim + 2);
  forbid_columns(m.total, t->rows, t->width, t->plan->dim + 2);
  return m;
}

/* Buffers for a tile in this thread's scratch memory; `q` is null when out of memory. */
static Buffers reserve(const Tile *t) {
  Parts measured = {0};
  lay_out(t, &measured);
  Parts parts = {.memory = take(&own, measured.bytes)};
  return lay_out(t, &parts);
}

/* Scaled queries [rows][dim]: as float32, or as bfloat16 padded with 0 to whole tiles. */
INLINE void load_queries(const Tile *t, const float *q, const int bf16, void *out) {
  const Plan *p = t->plan;
  const int64_t stride = bf16 ? round_up(p->dim, DOT) : p->dim;
  if (bf16) memset(out, 0, (size_t)(round_up(t->rows, SIDE) * stride) * sizeof(uint16_t));
  for (int64_t r = 0; r < t->rows; r++) {
    const int64_t from = packed_row(t, r) * p->dim;
    for (int64_t d = 0; d < p->dim; d += LANES)
      store_any(out, r * stride + d, bf16, load_f32(q + from + d) * splat(p->scale));
  }
}

static void score_any(const Tile *t, const Buffers *m, int64_t first, int64_t stop, float *out,
                      int64_t stride) {
  CHECK(stop - first <= stride && stop <= t->k->slots && stop <= t->v->slots);
  switch (products_of(t->plan)) {
    case TILES: score_tiles(t, m, first, stop, out, stride); break;
    case DOTS: score_dots(t, m, first, stop, out, stride); break;
    default: score(t, m, first, stop, out, stride);
  }
}

/* Adds the weighted values of every row's own path. */
static void weigh_paths(const Tile *t, const Buffers *m, int64_t base, float *part) {
  const QueryBlock *b = t->block;
  const int64_t dim = t->plan->dim;
  const int type = (int)t->plan->kv_type;
  for (int64_t r = 0; r < t->rows; r++) {
    const int64_t n = t->node + r / t->group, at = position(t, n);
    const int32_t *path = b->paths + b->path_starts[n];
    CHECK(b->path_starts[n] + at - b->start < b->path_starts[n + 1]);
    for (int64_t c = max(base, b->start); c < min(base + CHUNK, at + 1); c++) {
      float weight = m->scores[r * STRIDE + c - base];
      const int64_t slot =
          t->head * t->v->head_stride + (b->start + path[c - b->start]) * t->v->slot_stride;
      if (type == KV_INT8) weight *= scale_of(t->v, slot, dim);
      for (int64_t d = 0; d < dim; d += LANES) {
        float *sum = part + r * t->width + d;
        store_f32(sum, fma_(splat(weight), load_kv(t->v->data, slot + d, type), load_f32(sum)));
      }
    }
  }
}

/* The scores of row r and the chunk from `base` on, complete: with those of its own path. `stop` is
 * the end of the prefix in the chunk. */
static Scores complete_scores(const Tile *t, const Buffers *m, int64_t r, int64_t base,
                              int64_t stop) {
  const Plan *p = t->plan;
  const QueryBlock *b = t->block;
  const int64_t n = t->node + r / t->group, at = position(t, n);
  float *row = m->scores + r * STRIDE;
  if (b->depths) {
    const int32_t *path = b->paths + b->path_starts[n];
    CHECK(b->path_starts[n] + at - b->start < b->path_starts[n + 1]);
    for (int64_t c = max(base, b->start); c < min(base + CHUNK, at + 1); c++)
      row[c - base] = m->tree[r * t->tree_columns + path[c - b->start]];
  }
  /* Both stay within the row: the window of a deep node can begin behind the chunk, and a shallow
   * node can end before it. */
  const int64_t from = p->window ? min(CHUNK, max(0, at - p->window + 1 - base)) : 0;
  const int64_t to = min(CHUNK, max(0, at + 1 - base));
  if (p->cap != 0.0f)
    for (int64_t c = from / LANES * LANES; c < to; c += LANES)
      store_f32(row + c, cap_(load_f32(row + c), p->cap));
  if (t->probes.count) note(t, row, r, base, from, to);
  return (Scores){row, from, to, round_up(max(to, stop - base), DOT)};
}

/* Turns the scores of all rows into weights; sets their sums and largest scores in `part`. */
static void weigh_scores(const Tile *t, const Buffers *m, int64_t base, int64_t stop, float *part) {
  for (int64_t r = 0; r < t->rows; r += TOGETHER) {
    const int64_t count = min(TOGETHER, t->rows - r);
    Scores rows[TOGETHER];
    float peak[TOGETHER], sum[TOGETHER];
    for (int64_t i = 0; i < count; i++) rows[i] = complete_scores(t, m, r + i, base, stop);
    if (products_of(t->plan) == CHAINS)
      softmax(rows, count, 0, peak, sum);
    else
      softmax(rows, count, 1, peak, sum);
    for (int64_t i = 0; i < count; i++) {
      float *result = part + (r + i) * t->width + t->plan->dim;
      result[0] = sum[i], result[1] = peak[i];
    }
  }
}

/* Results of all rows for one chunk, to part [rows][width]. */
static void attend_chunk(const Tile *t, const Buffers *m, int64_t chunk, float *part) {
  const int64_t base = chunk * CHUNK, stop = max(base, min(base + CHUNK, t->prefix));
  score_any(t, m, base, stop, m->scores, STRIDE);
  weigh_scores(t, m, base, stop, part);
  switch (products_of(t->plan)) {
    case TILES: weigh_tiles(t, m, base, stop, part); break;
    case DOTS: weigh_dots(t, m, base, stop, part); break;
    default:
      weigh_values(t, m, base, stop, part);
      if (t->block->depths) weigh_paths(t, m, base, part);
  }
}

/* Merges the results of the next chunk into those of the rows. */
static void merge(const Tile *t, float *total, const float *part) {
  const int64_t dim = t->plan->dim;
  for (int64_t r = 0; r < t->rows; r++, total += t->width, part += t->width) {
    const float before = total[dim + 1], peak = part[dim + 1];
    if (peak == -INFINITY) continue;
    const float less = exp_one(-fabsf(peak - before)); /* of the smaller peak; 1 of the larger */
    const float keep = peak > before ? less : 1.0f, add = peak > before ? 1.0f : less;
    for (int64_t d = 0; d < dim; d += LANES)
      store_f32(total + d, fma_(load_f32(total + d), splat(keep), load_f32(part + d) * splat(add)));
    total[dim] = fmaf(total[dim], keep, part[dim] * add);
    total[dim + 1] = peak > before ? peak : before;
  }
}

/* Writes the rows' results, and what is left of their probes. */
static void finish(const Tile *t, float *total, float *out) {
  const Plan *p = t->plan;
  for (int64_t r = 0; r < t->rows; r++) {
    float *row = total + r * t->width;
    if (p->sinks)
      row[p->dim] += exp_one(p->sinks[t->head * t->group + r % t->group] - row[p->dim + 1]);
    float *to = out + packed_row(t, r) * p->dim;
    for (int64_t d = 0; d < p->dim; d += LANES)
      store_f32(to + d, load_f32(row + d) / splat(row[p->dim]));
  }
  finish_probes(t, total);
}

/* Buffers with the tile's queries. Returns 0, or 1 without memory. */
static int begin(const Tile *t, Buffers *m, const float *q) {
  *m = reserve(t);
  if (!m->q) return 1;
  if (products_of(t->plan) != CHAINS) {
    load_queries(t, q, 1, m->q);
    if (products_of(t->plan) == TILES) {
      configure_tiles(64);
      if (turned(t)) turn_queries(t, m);
    }
  } else {
    load_queries(t, q, 0, m->q);
  }
  return 0;
}

/* Scores of the tree's nodes, from which each row gathers those of its path. */
static void score_tree(const Tile *t, const Buffers *m) {
  const int64_t start = t->block->start;
  if (t->block->depths) score_any(t, m, start, start + t->block->length, m->tree, t->tree_columns);
}

static int attend_tile(const Tile *t, const float *q, float *out) {
  Buffers m;
  if (begin(t, &m, q)) return 1;
  score_tree(t, &m);
  for (int64_t chunk = t->first; chunk < t->chunks; chunk++) {
    attend_chunk(t, &m, chunk, chunk == t->first ? m.total : m.part);
    if (chunk > t->first) merge(t, m.total, m.part);
  }
  finish(t, m.total, out);
  return 0;
}

/* Results of chunks from .. to of a tile, to parts [chunk][rows][width]. */
static int attend_range(const Tile *t, const float *q, int64_t from, int64_t to, float *parts) {
  Buffers m;
  if (from == to) return 0;
  if (begin(t, &m, q)) return 1;
  if (to * CHUNK > t->block->start) score_tree(t, &m);
  for (int64_t chunk = from; chunk < to; chunk++)
    attend_chunk(t, &m, chunk, parts + (chunk - t->first) * t->rows * t->width);
  return 0;
}

/* In `memory`, or measured: the results of all chunks of each item before `item`. */
static Parts parts_before(const Attention *a, void *memory, int64_t item) {
  Parts p = {.memory = memory};
  for (int64_t i = 0; i < item; i++) {
    const Tile t = tile_of(a, i);
    const int64_t rows = (t.chunks - t.first) * t.rows;
    forbid_columns(add_floats(&p, rows * t.width), rows, t.width, t.plan->dim + 2);
  }
  return p;
}

/* Results of the chunks of an item, if it is split. */
static float *parts_of(const Attention *a, int64_t item) {
  return a->parts + parts_before(a, NULL, item).bytes / (int64_t)sizeof(float);
}

/* Products of queries and keys; a measure of time. */
static int64_t attention_work(const Plan *p) {
  int64_t work = 0;
  for (int64_t i = 0; i < p->tiles; i++) {
    const QueryBlock *b = p->block + p->tile[3 * i];
    work += p->tile[3 * i + 2] * p->q_heads * (b->start + b->length) * p->dim;
  }
  return work;
}

/* Whether the dot product is not that of dot_plain, on random numbers of all sizes. */
int64_t paceline_dot_check(void) {
  uint32_t seed = 1, words[3][LANES];
  for (int64_t round = 0; round < 30000; round++) {
    for (int64_t i = 0; i < 3 * LANES; i++) {
      seed = seed * 1664525 + 1013904223;
      uint32_t word = (seed >> 16 | seed << 16) & 0xbfffbfff;          /* below 2: no infinities */
      if (round % 3) word &= round % 3 == 1 ? 0x83ff83ff : 0xa1ffa1ff; /* tiny numbers */
      words[i / LANES][i % LANES] = word;
    }
    vec x[3];
    memcpy(x, words, sizeof x);
    const vec found = dot_pairs(x[0], x[1], x[2]), expected = dot_plain(x[0], x[1], x[2]);
    for (int i = 0; i < LANES; i++)
      if (found[i] != expected[i]) return 1;
  }
  return 0;
}

int64_t attention_begin(Attention *a, int64_t threads) {
  const int64_t items = a->plan->tiles * a->plan->kv_heads;
  const int64_t kept = kept_bytes(a->plan, a->probes);
  Parts p = parts_before(a, NULL, items);
  const int split = threads > 1 && attention_work(a->plan) > SMALL_WORK &&
                    items < SPLIT_ITEMS * threads && p.bytes <= SPLIT_BYTES;
  a->ranges = split ? SPLIT_ITEMS * threads : 0;
  a->parts = NULL, a->raw = NULL;
  if (!split) p.bytes = 0;
  if (!p.bytes && !kept) return 0;
  a->parts = take(&shared, p.bytes + round_up(kept, 64) + GAP);
  if (!a->parts) return 1;
  p.memory = a->parts;
  if (GAP && split) p = parts_before(a, a->parts, items);
  a->raw = add_part(&p, kept);
  return 0;
}

int64_t attention_items(const Attention *a) {
  const int64_t items = a->plan->tiles * a->plan->kv_heads;
  return a->ranges ? items * a->ranges : items;
}

int64_t attention_item(const Attention *a, int64_t i) {
  Tile t = tile_of(a, a->ranges ? i / a->ranges : i);
  take_probes(a, &t);
  if (!a->ranges) return attend_tile(&t, a->q, a->out);
  const int64_t chunks = t.chunks - t.first, range = i % a->ranges;
  return attend_range(&t, a->q, t.first + chunks * range / a->ranges,
                      t.first + chunks * (range + 1) / a->ranges, parts_of(a, i / a->ranges));
}

/* Pieces of the nodes of an item of which each is merged on its own. */
static int64_t merge_pieces(const Attention *a, int64_t item) {
  return round_up(a->plan->tile[item / a->plan->kv_heads * 3 + 2], MERGED) / MERGED;
}

int64_t attention_merge_items(const Attention *a) {
  int64_t pieces = 0;
  for (int64_t i = 0; a->ranges && i < a->plan->tiles * a->plan->kv_heads; i++)
    pieces += merge_pieces(a, i);
  return pieces;
}

void attention_merge_item(const Attention *a, int64_t piece) {
  int64_t item = 0;
  for (; piece >= merge_pieces(a, item); item++) piece -= merge_pieces(a, item);
  Tile t = tile_of(a, item);
  const int64_t next = t.rows * t.width, node = piece * MERGED;
  float *parts = parts_of(a, item) + node * t.group * t.width;
  t.node += node;
  t.rows = min(t.rows - node * t.group, MERGED * t.group);
  take_probes(a, &t);
  for (int64_t chunk = 1; chunk < t.chunks - t.first; chunk++)
    merge(&t, parts, parts + chunk * next);
  finish(&t, parts, a->out);
}
