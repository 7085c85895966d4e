/* Runs a program in stages of the team. A product and an attention are a stage or two each. The
 * row-wise operations between them, the preparation of the next product included, are one stage: a
 * thread takes a row through all of them, and the row stays in its first-level cache.
 *
 * Long batches run slice by slice: all operations up to the selection for the first blocks, then
 * for the next ones. The bits of a row do not depend on it, and buffers stay small. */
#include "program.h"

#include <time.h>

#include "team.h"

#define SLICE 512   /* rows after which a slice ends, at the end of a block */
#define VALUES 4096 /* values of an item of a row-wise operation, some us */

typedef struct {
  const Program *program;
  const Run *run;
  int64_t threads;
  int64_t at, part;      /* operation, and which of its stages; at is -1 before the first */
  int64_t stop;          /* row-wise stage: the first operation behind it, */
  int64_t prepares;      /* which is a product that the stage prepares */
  int64_t first, rows;   /* rows of the slice, or selected rows */
  int64_t begins, block; /* first block of the slice, and the one after it */
  int64_t tile, tiles;   /* its tiles */
  int64_t piece;         /* rows of an item */
  int64_t items;         /* of the stage */
  Attention attention;
  Plan plan;
  Cache *keys, *values;     /* of the layer, by sequence */
  int64_t *sequence, *slot; /* of every row */
  Slots slots;              /* of the experts of a layer */
  float **buffers;
  void *scratch;
  int64_t bytes;    /* of scratch */
  int64_t states;   /* floats of a thread in scratch, for DELTA */
  int64_t together; /* items of a stage that the team counts as one */
  int64_t since;    /* when the stage began, if times are wanted */
  _Atomic int failed;
} State;

static int64_t longest_block(const Run *r) {
  int64_t longest = 0;
  for (int64_t i = 0; i < r->blocks; i++)
    if (r->block[i].length > longest) longest = r->block[i].length;
  return longest;
}

/* Most rows of a slice. */
static int64_t slice_rows(const Run *r) {
  const int64_t limit = SLICE + longest_block(r) - 1;
  return r->rows < limit ? r->rows : limit;
}

static int64_t extent(const Program *p, const Run *r, int64_t buffer) {
  switch (p->buffer[buffer].extent) {
    case ALL_ROWS: return r->rows;
    case SLICE_ROWS: return slice_rows(r);
    case SLOT_ROWS: return slice_rows(r) * p->top;
    default: return r->selected;
  }
}

/* Bytes of prepared activations of a product. */
static int64_t scratch_bytes(const Program *p, const Run *r, const Operation *o) {
  const int64_t rows = extent(p, r, o->out);
  return o->experts ? experts_scratch(o->weight, o->experts, rows)
                    : linear_scratch(o->weight, rows);
}

static int64_t team_size(const Run *r) {
  return r->threads < MAX_THREADS ? r->threads : MAX_THREADS;
}

/* Floats of a thread for the states of drafted rows of DELTA. */
static int64_t states_of(const Program *p, const Run *r) {
  int64_t most = 0;
  for (int64_t i = 0; i < p->operations && !most; i++) /* all layers have one shape */
    for (int64_t j = 0; p->operation[i].kind == DELTA && j < r->blocks; j++)
      most = max(most, delta_scratch(p->operation[i].weight, r->block + j, r->committed[j]));
  return most;
}

/* Lays out the memory of a run from s->run->memory on; returns its bytes. */
static int64_t lay_out(State *s) {
  const Program *p = s->program;
  const Run *r = s->run;
  const int64_t size = (int64_t)sizeof(int64_t), slots = slice_rows(r) * p->top;
  Parts parts = {.memory = r->memory};
  s->keys = add_part(&parts, r->sequences * (int64_t)sizeof(Cache));
  s->values = add_part(&parts, r->sequences * (int64_t)sizeof(Cache));
  s->sequence = add_part(&parts, r->rows * size);
  s->slot = add_part(&parts, r->rows * size);
  s->buffers = add_part(&parts, p->buffers * (int64_t)sizeof(float *));
  for (int64_t i = 1; i < p->buffers; i++) {
    const int64_t floats = extent(p, r, i) * p->buffer[i].width;
    float *buffer = add_part(&parts, floats * (int64_t)sizeof(float));
    if (r->memory) s->buffers[i] = buffer;
  }
  if (r->memory) s->buffers[0] = r->logits;
  s->slots.row = add_part(&parts, slots * size);
  s->slots.slot = add_part(&parts, slots * size);
  s->slots.group = add_part(&parts, slots * (int64_t)sizeof(Group));
  s->states = states_of(p, r);
  s->bytes = team_size(r) * s->states * (int64_t)sizeof(float);
  for (int64_t i = 0; i < p->operations; i++) {
    const Operation *o = p->operation + i;
    if (o->kind != MULTIPLY) continue;
    s->bytes = max(s->bytes, scratch_bytes(p, r, o));
  }
  s->scratch = add_part(&parts, s->bytes);
  return parts.bytes;
}

/* Bytes of memory that a run needs. */
int64_t paceline_program_bytes(const Program *p, const Run *r) {
  Run measured = *r;
  measured.memory = NULL;
  State s = {.program = p, .run = &measured};
  return lay_out(&s);
}

/* Whether an operation works on slots of experts, not on rows. */
static int over_slots(const Program *p, const Operation *o) {
  return p->buffer[o->out ? o->out : o->in].extent == SLOT_ROWS;
}

/* The rows of a buffer that the present operation works on. */
static float *rows_of(const State *s, int64_t buffer) {
  const Buffer *b = s->program->buffer + buffer;
  CHECK(!buffer || b->extent != SELECTED_ROWS || s->at >= s->program->selecting);
  return s->buffers[buffer] + (b->extent == ALL_ROWS ? s->first * b->width : 0);
}

/* Begins the slice of the next blocks, or the operations over selected rows. Returns whether there
 * is one. */
static int next_slice(State *s) {
  const Program *p = s->program;
  const Run *r = s->run;
  if (s->at > p->selecting) return 0;
  s->first += s->rows;
  s->rows = 0;
  s->tile += s->tiles;
  s->tiles = 0;
  if (s->block == r->blocks) {
    s->at = p->selecting;
    s->first = 0;
    s->rows = r->selected;
    return s->rows > 0;
  }
  s->at = 0;
  s->begins = s->block;
  while (s->block < r->blocks && s->rows < SLICE) s->rows += r->block[s->block++].length;
  while (s->tile + s->tiles < r->tiles && r->tile[3 * (s->tile + s->tiles)] < s->block) s->tiles++;
  CHECK(s->rows <= slice_rows(r) && s->first + s->rows <= r->rows);
  return 1;
}

static void show_caches(State *s, const Cache *const *caches, int64_t layer) {
  for (int64_t i = 0; i < s->run->sequences; i++) {
    s->keys[i] = caches[i][2 * layer];
    s->values[i] = caches[i][2 * layer + 1];
  }
}

static int row_wise(const State *s) {
  const int64_t kind = s->program->operation[s->at].kind;
  return kind != ATTEND && kind != ATTEND_CONTEXT && kind != DELTA &&
         (kind != MULTIPLY || s->part == 0);
}

/* Moves to the next stage. Returns whether there is one. */
static int next_stage(State *s) {
  const Program *p = s->program;
  if (s->failed) return 0;
  if (s->at < 0) return next_slice(s);
  if (row_wise(s)) {
    s->at = s->stop;
    s->part = s->prepares;
  } else {
    const int64_t kind = p->operation[s->at].kind;
    s->part = (kind == ATTEND || kind == ATTEND_CONTEXT) && !s->part; /* an attention is merged */
    s->at += !s->part;
  }
  if (s->part) return 1;
  return s->at == p->selecting || s->at == p->operations ? next_slice(s) : 1;
}

/* Sets the end of the row-wise stage that begins at the present operation. */
static void chain_rows(State *s) {
  const Program *p = s->program;
  const int64_t end = s->at < p->selecting ? p->selecting : p->operations;
  int64_t layer = -1;
  s->prepares = 0;
  for (s->stop = s->at; s->stop < end; s->stop++) {
    const Operation *o = p->operation + s->stop;
    if (over_slots(p, o) != over_slots(p, p->operation + s->at)) return;
    if (o->kind == MULTIPLY) {
      s->prepares = 1;
      return;
    }
    if (o->kind == ATTEND || o->kind == ATTEND_CONTEXT || o->kind == DELTA) return;
    if (o->kind == CONVOLVE) { /* reads other rows: a stage of its own */
      s->stop += s->stop == s->at;
      return;
    }
    if (o->kind == ROTATE) {
      if (layer >= 0) return; /* the state shows the caches of one layer */
      show_caches(s, s->run->caches, layer = o->layer);
    }
  }
}

static void copy_queries(const State *s, const Operation *o) {
  const Queries *wanted = s->run->queries + o->layer;
  const int64_t width = s->program->buffer[o->in].width;
  for (int64_t i = 0; i < wanted->count; i++) {
    const int64_t row = wanted->row[i] - s->first;
    CHECK(wanted->row[i] >= 0 && wanted->row[i] < s->run->rows);
    if (row >= 0 && row < s->rows)
      memcpy(wanted->out + i * width, s->buffers[o->in] + row * width,
             (size_t)width * sizeof(float));
  }
}

/* Returns the number of items; sets `failed` without memory. */
static int64_t begin_attention(State *s, const Operation *o) {
  static const Probes none;
  const Program *p = s->program;
  const Run *r = s->run;
  const int context = o->kind == ATTEND_CONTEXT;
  show_caches(s, context ? r->contexts : r->caches, o->layer);
  if (r->queries && !context) copy_queries(s, o);
  s->plan = (Plan){.q_heads = p->q_heads,
                   .kv_heads = p->kv_heads,
                   .dim = p->dim,
                   .window = o->window,
                   .kv_type = context ? r->context_type : r->kv_type,
                   .products = p->products,
                   .scale = (float)p->scale,
                   .cap = (float)p->cap,
                   .sinks = o->weight,
                   .blocks = r->blocks,
                   .block = context ? r->context_block : r->block,
                   .tiles = s->tiles,
                   .tile = r->tile + 3 * s->tile};
  /* Blocks name rows of the batch, buffers hold those of the slice. */
  s->attention = (Attention){.plan = &s->plan,
                             .keys = s->keys,
                             .values = s->values,
                             .probes = r->probes && !context ? r->probes + o->layer : &none,
                             .q = s->buffers[o->in] - s->first * p->buffer[o->in].width,
                             .out = s->buffers[o->out] - s->first * p->buffer[o->out].width};
  if (attention_begin(&s->attention, s->threads)) {
    s->failed = 1;
    return 0;
  }
  return attention_items(&s->attention);
}

/* Rows, or slots, of the present operation. */
static int64_t rows_at(const State *s) {
  return over_slots(s->program, s->program->operation + s->at) ? s->rows * s->program->top
                                                               : s->rows;
}

/* Prepares the present stage; returns its items. */
static int64_t begin_stage(State *s) {
  const Program *p = s->program;
  const Operation *o = p->operation + s->at;
  if (row_wise(s)) {
    const int64_t width = p->buffer[o->in ? o->in : o->out].width;
    if (o->kind == SPREAD) spread_rows(&s->slots, rows_of(s, o->delta), s->rows, p->top);
    chain_rows(s);
    if (s->stop == s->at && !linear_prepare_items(o->weight, s->rows)) return 0;
    if (s->prepares && over_slots(p, o))
      divide_product(&s->slots, p->operation[s->stop].weight, s->bytes);
    s->piece = width < VALUES ? VALUES / width : 1;
    return (rows_at(s) + s->piece - 1) / s->piece;
  }
  if (o->kind == MULTIPLY)
    return o->experts ? divide_product(&s->slots, o->weight, s->bytes)
                      : linear_items(o->weight, s->rows);
  if (o->kind == DELTA) return s->run->sequences * ((const Delta *)o->weight)->key_heads;
  return s->part == 0 ? begin_attention(s, o) : attention_merge_items(&s->attention);
}

static void embed(const State *s, const Operation *o, int64_t row) {
  const int64_t width = s->program->buffer[o->out].width, token = s->run->tokens[s->first + row];
  float *out = rows_of(s, o->out) + row * width;
  const vec factor = splat((float)o->factor);
  if (o->second) linear_row(o->second, token, out);
  for (int64_t i = 0; i < width; i += LANES) {
    vec x = o->second ? load_f32(out + i) : load_any(o->weight, token * width + i, (int)o->bf16);
    store_f32(out + i, x * factor);
  }
}

static void copy_input(const State *s, const Operation *o, int64_t row) {
  const int64_t width = s->program->buffer[o->out].width, from = (s->first + row) * width;
  float *out = rows_of(s, o->out) + row * width;
  for (int64_t i = 0; i < width; i += LANES)
    store_f32(out + i, load_any(s->run->inputs, from + i, (int)s->run->inputs_bf16));
}

static void rotate_heads(const State *s, const Operation *o, int64_t row) {
  const Program *p = s->program;
  const Run *r = s->run;
  const int64_t at = s->first + row, of = s->sequence[at];
  const float *rows = r->table + r->position[at] * p->dim;
  const Heads heads = {.q_heads = o->q_heads,
                       .kv_heads = o->kv_heads,
                       .dim = p->dim,
                       .q_weight = o->weight,
                       .k_weight = o->second,
                       .v_weight = o->values,
                       .q_factors = o->factors,
                       .whole = (int)o->whole,
                       .eps = (float)o->eps};
  rotate_row(&heads, rows_of(s, o->in) + row * p->buffer[o->in].width,
             rows + o->q_rope * r->table_rows * p->dim, rows + o->rope * r->table_rows * p->dim,
             rows_of(s, o->out) + row * p->buffer[o->out].width, s->keys + of, s->values + of,
             s->slot[at], (int)r->kv_type);
}

static void run_row(const State *s, const Operation *o, int64_t row) {
  const Run *r = s->run;
  const int64_t top = s->program->top;
  const int64_t width = s->program->buffer[o->in].width;
  float *in = rows_of(s, o->in) + row * width;
  switch (o->kind) {
    case EMBED: embed(s, o, row); break;
    case INPUT: copy_input(s, o, row); break;
    case ADD_NORM:
      if (o->delta) add_row(in, rows_of(s, o->delta) + row * width, (float)o->factor, width);
      for (int64_t i = 0, wide = o->window ? o->window : width; i < width; i += wide)
        normalise(in + i, o->weight, wide, (float)o->eps, rows_of(s, o->out) + row * width + i);
      break;
    case ROTATE: rotate_heads(s, o, row); break;
    case GATE: {
      const int64_t wide = s->program->buffer[o->out].width;
      const int64_t all = s->program->buffer[o->delta].width;
      const float *ups = o->delta ? rows_of(s, o->delta) + row * all + o->layer * wide : in + wide;
      gate_row(in, ups, rows_of(s, o->out) + row * wide, (int)o->gelu, (float)o->limit, wide);
      break;
    }
    case ADD: add_row(in, rows_of(s, o->delta) + row * width, (float)o->factor, width); break;
    case SCALE:
      for (int64_t i = 0; i < width; i += LANES)
        store_f32(in + i, load_f32(in + i) * splat((float)o->factor));
      break;
    case SIGMOID_GATE: {
      const int64_t wide = s->program->buffer[o->delta].width;
      const float *gates = rows_of(s, o->delta) + (row + 1) * wide;
      if (wide == 1)
        sigmoid_scale_row(in, gates[-1], width);
      else
        sigmoid_gate_row(in, gates - width, width);
      break;
    }
    case CONVOLVE: {
      const int64_t wide = s->program->buffer[o->delta].width, groups = wide / (2 * o->window);
      convolve_row(in, o->weight, rows_of(s, o->delta) + row * wide + o->layer * wide / 2,
                   o->window, groups, row % r->block->length, rows_of(s, o->out) + row * width,
                   width);
      break;
    }
    case CAP: cap_row(in, (float)o->factor, width); break;
    case ROUTE: {
      const Routing routing = {.experts = o->experts,
                               .top = top,
                               .among = (int)o->among,
                               .sigmoid = (int)o->sigmoid,
                               .factor = (float)o->factor,
                               .min_sum = (float)o->limit,
                               .choice = o->weight,
                               .factors = o->factors};
      route_row(&routing, in, rows_of(s, o->out) + row * 2 * top);
      break;
    }
    case SPREAD:
      memcpy(rows_of(s, o->out) + row * width, rows_of(s, o->in) + s->slots.row[row] * width,
             (size_t)width * sizeof(float));
      break;
    case COMBINE:
      combine_row(rows_of(s, o->in), s->slots.slot + row * top,
                  rows_of(s, o->delta) + (2 * row + 1) * top, top, rows_of(s, o->out) + row * width,
                  width);
      break;
    case TAP:
      for (int64_t i = 0; r->taps && r->taps[o->layer] && i < width; i += LANES)
        store_any(r->taps[o->layer], (s->first + row) * width + i, (int)r->taps_bf16,
                  load_f32(in + i));
      break;
    case SELECT:
      in = s->buffers[o->in] + (r->selection ? r->selection[row] : row) * width;
      memcpy(rows_of(s, o->out) + row * width, in, (size_t)width * sizeof(float));
  }
}

/* Prepares a row, or slot, of a product. */
static void prepare_row(const State *s, const Operation *o, int64_t row) {
  const float *x = rows_of(s, o->in);
  if (!o->experts) {
    linear_prepare(o->weight, x, s->rows, s->scratch, row);
    return;
  }
  const Group *g = group_at(&s->slots, row, 0);
  const Matrix *m = (const Matrix *)o->weight + g->expert;
  linear_prepare(m, x + g->first * m->ins, g->count, (char *)s->scratch + g->scratch,
                 row - g->first);
}

static void multiply_item(const State *s, const Operation *o, int64_t item) {
  const float *x = rows_of(s, o->in);
  float *out = rows_of(s, o->out);
  if (!o->experts) {
    linear_item(o->weight, x, s->scratch, s->rows, out, item);
    return;
  }
  const Group *g = group_at(&s->slots, item, 1);
  const Matrix *m = (const Matrix *)o->weight + g->expert;
  linear_item(m, x + g->first * m->ins, (char *)s->scratch + g->scratch, g->count,
              out + g->first * m->outs, item - g->item);
}

/* All blocks of a sequence in the slice, by one key head. */
static void delta_item(const State *s, const Operation *o, int64_t item) {
  const Program *p = s->program;
  const Delta *d = o->weight;
  const int64_t sequence = item / d->key_heads;
  const float *in = rows_of(s, o->in) - s->first * p->buffer[o->in].width;
  float *out = rows_of(s, o->out) - s->first * p->buffer[o->out].width;
  float *scratch = (float *)s->scratch + omp_get_thread_num() * s->states;
  CHECK(omp_get_thread_num() < team_size(s->run));
  for (int64_t i = s->begins; i < s->block; i++)
    if (s->run->block[i].sequence == sequence)
      delta_block(d, s->run->states + sequence, o->layer, s->run->block + i, s->run->committed[i],
                  item % d->key_heads, in, out, scratch);
}

static void work_item(State *s, int64_t item) {
  const Operation *o = s->program->operation + s->at;
  if (row_wise(s)) {
    const Operation *stop = s->program->operation + s->stop;
    const int64_t rows = rows_at(s);
    for (int64_t row = item * s->piece; row < (item + 1) * s->piece && row < rows; row++) {
      for (const Operation *each = o; each < stop; each++) run_row(s, each, row);
      if (s->prepares && linear_prepare_items(stop->weight, s->rows)) prepare_row(s, stop, row);
    }
  } else if (o->kind == MULTIPLY) {
    multiply_item(s, o, item);
  } else if (o->kind == DELTA) {
    delta_item(s, o, item);
  } else if (s->part) {
    attention_merge_item(&s->attention, item);
  } else if (attention_item(&s->attention, item)) {
    s->failed = 1;
  }
}

static void work(void *state, int64_t item) {
  State *s = state;
  for (int64_t i = item * s->together; i < min(s->items, (item + 1) * s->together); i++)
    work_item(s, i);
}

/* Adds the time of the stage that has ended to that of its first operation. */
static void count_time(State *s) {
  struct timespec now;
  if (!s->run->nanoseconds) return;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t at = now.tv_sec * 1000000000 + now.tv_nsec;
  if (s->at >= 0) s->run->nanoseconds[s->at] += at - s->since;
  s->since = at;
}

/* The next stage with items for several threads. Those of a single item run at once: giving them to
 * another thread would take longer. */
static int64_t begin(void *state) {
  State *s = state;
  while (count_time(s), next_stage(s)) {
    s->items = begin_stage(s);
    s->together = (s->items + MAX_ITEMS - 1) / MAX_ITEMS; /* more than 1 for gigabytes of logits */
    if (s->items > 1) return (s->items + s->together - 1) / s->together;
    if (s->items) work_item(s, 0);
  }
  return 0;
}

static void expand_blocks(const State *s) {
  for (int64_t i = 0; i < s->run->blocks; i++) {
    const QueryBlock *b = s->run->block + i;
    for (int64_t n = 0; n < b->length; n++) {
      s->sequence[b->row + n] = b->sequence;
      s->slot[b->row + n] = b->start + n;
    }
  }
}

static int outside(const int64_t *numbers, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    if (numbers[i] < 0 || numbers[i] >= end) return 1;
  return 0;
}

static int64_t threads_of(const Program *p, const Run *r) {
  int64_t weights = 0;
  for (int64_t i = 0; i < p->operations; i++) {
    const Matrix *m = p->operation[i].weight;
    if (p->operation[i].kind == MULTIPLY)
      weights += m->outs * m->ins * (p->operation[i].experts ? p->top : 1);
  }
  return little_work(r->rows, weights) ? 1 : r->threads;
}

#ifdef PACELINE_CHECK
/* Whether an operation's rows fit the buffers that it writes to. */
static void check_widths(const Program *p, const Operation *o) {
  const int64_t in = p->buffer[o->in].width, delta = p->buffer[o->delta].width;
  const int64_t out = p->buffer[o->out].width, queries = o->q_heads * p->dim;
  switch (o->kind) {
    case ADD_NORM:
      CHECK(out == in && (!o->delta || delta == in) && (!o->window || in % o->window == 0));
      break;
    case ADD: CHECK(delta == in); break;
    case ROTATE: CHECK(queries + 2 * o->kv_heads * p->dim <= in && queries <= out); break;
    case ATTEND:
    case ATTEND_CONTEXT: CHECK(in == p->q_heads * p->dim && out == in); break;
    case GATE: CHECK(o->delta ? in == out && delta >= (o->layer + 1) * out : in == 2 * out); break;
    case SIGMOID_GATE: CHECK(delta >= in || delta == 1); break;
    case CONVOLVE: CHECK(o->window > 0 && delta % (2 * o->window) == 0 && out == in); break;
    case TAP: CHECK(in == p->buffer[p->operation->out].width); break;
    case SELECT:
    case SPREAD:
    case COMBINE: CHECK(out == in); break;
    case ROUTE:
      CHECK(p->top > 0 && p->top <= o->experts && o->experts <= MAX_EXPERTS);
      CHECK(o->experts <= in && 2 * p->top <= out);
  }
}

static void check_program(const Program *p) {
  CHECK(p && p->operations > 0 && p->operation && p->buffers > 0 && p->buffer);
  CHECK(p->selecting >= 0 && p->selecting <= p->operations);
  CHECK(p->dim > 0 && p->dim <= MAX_DIM && p->dim % WIDTH == 0);
  CHECK(p->kv_heads > 0 && p->q_heads > 0 && p->q_heads % p->kv_heads == 0);
  for (int64_t i = 0; i < p->buffers; i++) {
    const Buffer *b = p->buffer + i;
    CHECK(b->width >= 0 && b->extent >= ALL_ROWS && b->extent <= SLOT_ROWS);
  }
  for (int64_t i = 0; i < p->operations; i++) {
    const Operation *o = p->operation + i;
    CHECK(o->kind >= EMBED && o->kind <= CONVOLVE && o->layer >= 0 && o->window >= 0);
    CHECK(o->in >= 0 && o->in < p->buffers && o->delta >= 0 && o->delta < p->buffers);
    CHECK(o->out >= 0 && o->out < p->buffers);
    check_widths(p, o);
    for (int64_t e = 0; o->kind == MULTIPLY && e < max(1, o->experts); e++) {
      const Matrix *m = (const Matrix *)o->weight + e;
      check_matrix(m);
      CHECK(m->ins == p->buffer[o->in].width && m->outs == p->buffer[o->out].width);
    }
  }
}

static void check_run(const Program *p, const Run *r) {
  CHECK(r && r->rows > 0 && r->selected >= 0 && r->threads > 0);
  CHECK(r->memory && (uintptr_t)r->memory % 64 == 0);
  CHECK(r->sequences > 0 && r->caches && r->kv_type >= KV_F32 && r->kv_type <= KV_INT8);
  CHECK(r->blocks > 0 && r->block && r->position && (r->tokens || r->inputs));
  CHECK(!r->selected || p->selecting == p->operations || r->logits);
  for (int64_t i = 0; i < r->rows; i++)
    CHECK(r->position[i] >= 0 && r->position[i] < r->table_rows);
  for (int64_t i = 0; i < p->operations; i++) {
    const Operation *o = p->operation + i;
    CHECK(o->rope >= 0 && o->rope < r->tables && o->q_rope >= 0 && o->q_rope < r->tables);
  }
  int64_t row = 0;
  for (int64_t i = 0; i < r->blocks; i++) {
    const QueryBlock *b = r->block + i;
    CHECK(b->sequence >= 0 && b->sequence < r->sequences && b->start >= 0);
    CHECK(b->row == row && b->length > 0 && (row += b->length) <= r->rows);
    CHECK(!r->states || b->length <= MAX_TREE_NODES);
    CHECK(!b->depths == !b->paths && !b->depths == !b->path_starts);
    for (int64_t n = 0; b->depths && n < b->length; n++) {
      const int64_t length = b->path_starts[n + 1] - b->path_starts[n];
      CHECK(length > 0 && b->depths[n] == length - 1);
      for (int64_t i = 0; i < length; i++) {
        const int64_t node = b->paths[b->path_starts[n] + i];
        CHECK(node >= 0 && (i < length - 1 ? node < n : node == n));
      }
    }
  }
  for (int64_t i = 0; i < r->tiles; i++) {
    const int64_t *tile = r->tile + 3 * i;
    CHECK(tile[0] >= 0 && tile[0] < r->blocks && (!i || tile[0] >= tile[-3]));
    CHECK(tile[1] >= 0 && tile[2] > 0 && tile[1] + tile[2] <= r->block[tile[0]].length);
  }
  for (int64_t i = 0; r->probes && i < p->operations; i++) {
    const Probes *probes = r->probes + p->operation[i].layer;
    for (int64_t j = 0; p->operation[i].kind == ATTEND && j < probes->count; j++) {
      const Probe *probe = probes->probe + j;
      CHECK(probe->block >= 0 && probe->block < r->blocks && probe->out);
      CHECK(probe->node >= 0 && probe->node < r->block[probe->block].length);
    }
  }
}
#else
#define check_program(p) ((void)0)
#define check_run(p, r) ((void)0)
#endif

/* Runs a program. Returns 0; 1 when memory ran out; 2 for a token or selected row that does not
 * exist; 3 when a gather failed. */
int64_t paceline_run_program(const Program *p, const Run *r) {
  check_program(p);
  check_run(p, r);
  if (r->tokens && outside(r->tokens, r->rows, p->vocabulary)) return 2;
  if (r->selection && outside(r->selection, r->selected, r->rows)) return 2;
  State s = {.program = p, .run = r, .at = -1, .threads = threads_of(p, r)};
  const int64_t bytes = lay_out(&s);
  expand_blocks(&s);
  const Stages stages = {.begin = begin, .work = work, .state = &s};
  team_run(&stages, s.threads);
  ALLOW(r->memory, bytes);
  return s.failed;
}
