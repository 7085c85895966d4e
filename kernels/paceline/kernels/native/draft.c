/* Drafts of a block model for several texts in one call (DSpark, section 3): new hidden states go to
 * the contexts, one pass runs over all blocks, and a tree grows from the logits of each block. How a
 * tree grows is said in paceline.drafter.methods.beam, whose trees these are. */
#include <math.h>
#include <stdlib.h>

#include "program.h"
#include "sampling.h"

#define MAX_NODES 255
#define TILE_ROWS 128 /* as in executor.py */
#define OWNED __attribute__((cleanup(release)))

enum { OUT_OF_MEMORY = 1 };

typedef struct {
  const Program *context;   /* hidden states of the target to keys and values */
  const Program *block;     /* tokens to logits; tap 0 is what the LM head reads */
  int64_t length, levels;   /* positions of a block; the last `levels` of them predict */
  int64_t hidden, states;   /* width of tap 0, and of the states of a position */
  int64_t state_input;      /* whether a block's positions read the newest states */
  int64_t bf16, kv_type;    /* type of states, and of contexts */
  int64_t mask;             /* token of the positions behind the anchor */
  int64_t drafted;          /* logits of a position */
  const int64_t *ids;       /* [drafted]: their token ids, rising */
  int64_t rank;             /* of the sequential head; 0: none */
  const float *w1;          /* [rows, rank]; row i is of logit i, the last one of other tokens */
  const Matrix *w2;
  const float *confidence;  /* [hidden]; null: no confidence head */
  const float *offsets;     /* [rows]: share of the token before in the logit of a confidence */
} Model;

typedef struct {
  const Cache *context;     /* [layers][keys, values] */
  int64_t base;             /* position of their first slot, a multiple of CHUNK */
  int64_t first, length;    /* positions of the context; the states from `first` on are new */
  const char *fresh;        /* [length - first, states] */
  char *newest;             /* [states], of position length - 1; kept between calls */
  int64_t anchor, row;      /* token at position `length`, and its row of W1 */
  int64_t count;            /* logits of which candidates are taken, the first ones */
  double temperature;       /* 0: scores are the logits, without noise */
  uint64_t seed;
  int64_t nodes, depth;     /* at most */
  int64_t levels;
  const int64_t *width;     /* [levels]: nodes of a level; the last is of all deeper levels */
  double min_score;         /* nodes below it are not expanded */
  int64_t drafted;          /* the tree: its nodes, by falling survival */
  int64_t token[MAX_NODES], parent[MAX_NODES];
  double chance[MAX_NODES]; /* confidences */
} Text;

typedef struct {
  int64_t parent, row; /* row: of W1, which is the logit */
  double score, log;   /* logs of survival and confidence */
  int64_t order;       /* among equals; in a tree the number of the node */
} Node;

static void release(void *pointer) { free(*(void **)pointer); }

static void *allocate(int64_t bytes) {
  return aligned_alloc(64, (size_t)round_up(max(bytes, 64), 64));
}

/* Memory for the chains of a pass. */
typedef struct {
  int64_t *position, *tile;
  Block *block;
} Chains;

static void add_chain(Run *r, const Chains *c, const Program *p, Block block) {
  const int64_t nodes = max(1, TILE_ROWS / (p->q_heads / p->kv_heads));
  c->block[r->blocks] = block;
  for (int64_t node = 0; node < block.length; node += nodes) {
    int64_t *tile = c->tile + 3 * r->tiles++;
    tile[0] = r->blocks, tile[1] = node, tile[2] = min(nodes, block.length - node);
  }
  r->blocks++;
  r->rows += block.length;
}

static int64_t run_program(const Program *p, Run *r) {
  char *memory OWNED = allocate(paceline_program_bytes(p, r));
  if (!memory) return OUT_OF_MEMORY;
  r->memory = memory;
  return paceline_run_program(p, r);
}

/* Adds the new states of all texts to their contexts. */
static int64_t add_states(const Model *m, Text *const *texts, Run run) {
  const int64_t bytes = m->states * (m->bf16 ? 2 : 4);
  int64_t fresh = 0;
  for (int64_t t = 0; t < run.sequences; t++) fresh += texts[t]->length - texts[t]->first;
  if (!fresh) return 0;
  int64_t *numbers OWNED = allocate(7 * fresh * (int64_t)sizeof(int64_t));
  Block *blocks OWNED = allocate(fresh * (int64_t)sizeof(Block));
  char *inputs OWNED = allocate(fresh * bytes);
  if (!numbers || !blocks || !inputs) return OUT_OF_MEMORY;
  const Chains chains = {numbers, numbers + fresh, blocks};
  run.position = chains.position, run.tile = chains.tile, run.block = blocks, run.inputs = inputs;
  for (int64_t t = 0; t < run.sequences; t++) {
    const Text *text = texts[t];
    const int64_t added = text->length - text->first;
    if (!added) continue;
    memcpy(inputs + run.rows * bytes, text->fresh, (size_t)(added * bytes));
    memcpy(text->newest, text->fresh + (added - 1) * bytes, (size_t)bytes);
    for (int64_t at = text->first, stop; at < text->length; at = stop) {
      stop = min(text->length, (at / CHUNK + 1) * CHUNK); /* the same cuts however states come */
      for (int64_t i = at; i < stop; i++) chains.position[run.rows + i - at] = i;
      add_chain(&run, &chains, m->context,
                (Block){.sequence = t, .start = at - text->base, .length = stop - at, .row = run.rows});
    }
  }
  return run_program(m->context, &run);
}

/* Runs the blocks of all texts: logits [texts, levels, drafted], hidden [texts, levels, hidden]. */
static int64_t run_blocks(const Model *m, Text *const *texts, Run run, float *logits, float *hidden) {
  const int64_t rows = run.sequences * m->length, bytes = m->states * (m->bf16 ? 2 : 4);
  int64_t *numbers OWNED = allocate(6 * rows * (int64_t)sizeof(int64_t));
  int32_t *paths OWNED = allocate((2 * m->length + 1) * (int64_t)sizeof(int32_t));
  Block *blocks OWNED = allocate(2 * run.sequences * (int64_t)sizeof(Block));
  char *inputs OWNED = allocate(m->state_input ? rows * bytes : 0);
  if (!numbers || !paths || !blocks || !inputs) return OUT_OF_MEMORY;
  const Chains chains = {numbers, numbers + rows, blocks};
  Block *contexts = blocks + run.sequences;
  int64_t *tokens = numbers + 4 * rows, *selection = numbers + 5 * rows;
  int32_t *zeros = paths, *starts = paths + m->length; /* nodes that all are the first slot */
  for (int32_t i = 0; i < m->length; i++) zeros[i] = 0, starts[i] = i;
  starts[m->length] = (int32_t)m->length;
  void *taps[] = {hidden};
  run.position = chains.position, run.tile = chains.tile, run.block = blocks;
  run.tokens = tokens, run.selection = selection, run.inputs = m->state_input ? inputs : NULL;
  run.contexts = run.caches, run.context_block = contexts, run.context_type = run.kv_type;
  run.logits = logits, run.taps = taps;
  for (int64_t t = 0; t < run.sequences; t++) {
    const Text *text = texts[t];
    const int64_t start = text->length - text->base, first = run.rows;
    contexts[t] = (Block){t, start + m->length - 1, 1, first, zeros, zeros, starts};
    add_chain(&run, &chains, m->block,
              (Block){.sequence = t, .start = start, .length = m->length, .row = first});
    for (int64_t i = 0; i < m->length; i++) {
      chains.position[first + i] = text->length + i;
      tokens[first + i] = i ? m->mask : text->anchor;
      if (m->state_input) memcpy(inputs + (first + i) * bytes, text->newest, (size_t)bytes);
    }
    for (int64_t i = m->length - m->levels; i < m->length; i++) selection[run.selected++] = first + i;
  }
  return run_program(m->block, &run);
}

/* Memory for the levels of a tree. */
typedef struct {
  float *features, *scores, *noise, *logs;
  int64_t *ids;
  void *scratch;
  Node *found;
} Level;

static double log_sigmoid(double x) { return x > 0 ? -log1p(exp(-x)) : x - log1p(exp(x)); }

/* By falling score, then as they were found. */
static int by_score(const void *a, const void *b) {
  const Node *x = a, *y = b;
  if (x->score != y->score) return x->score > y->score ? -1 : 1;
  return x->order < y->order ? -1 : 1;
}

/* Finds `width` children of each of `parents` nodes, which are at depth `level`; returns how many. */
static int64_t find_children(const Model *m, const Text *t, const Level *l, const Node *nodes,
                             int64_t first, int64_t parents, int64_t level, int64_t width,
                             const float *logits, const float *hidden) {
  const float *scores = logits;
  int64_t stride = 0;
  if (m->rank) {
    Matrix w2 = *m->w2;
    w2.bias = logits;
    for (int64_t i = 0; i < parents; i++) {
      const int64_t row = level ? nodes[first + i].row : t->row;
      memcpy(l->features + i * m->rank, m->w1 + row * m->rank, (size_t)m->rank * sizeof(float));
    }
    paceline_linear(&w2, l->features, parents, l->scratch, l->scores);
    scores = l->scores, stride = m->drafted;
  }
  float *noise = t->temperature > 0 ? l->noise : NULL;
  if (noise) paceline_gumbel(t->seed, (uint64_t)(t->length + 1 + level), m->ids, t->count, noise);
  paceline_candidates(scores, stride, parents, t->count, width, (float)t->temperature, noise, l->ids,
                      l->logs);
  double own = 0;
  for (int64_t i = 0; m->confidence && i < m->hidden; i++) own += (double)hidden[i] * m->confidence[i];
  int chain = 1;
  for (int64_t i = 0; i < t->levels; i++) chain &= t->width[i] == 1;
  int64_t found = 0;
  for (int64_t i = 0; i < parents; i++) {
    const int64_t row = level ? nodes[first + i].row : t->row, *ids = l->ids + i * width;
    const double above = level ? nodes[first + i].score : 0;
    const float *logs = l->logs + i * width;
    double change = 0;
    if (m->confidence && logs[0] > -INFINITY) {
      change = log_sigmoid(own + (double)m->offsets[row]) - (double)logs[0];
      if (!chain) change = fmin(0, change); /* siblings are scaled together */
    }
    for (int64_t w = 0; w < width; w++, found++) {
      const double log = fmin(0, (double)logs[w] + change); /* rounding may leave it above 0 */
      l->found[found] = (Node){level ? first + i : -1, ids[w], above + log, log, found};
    }
  }
  return found;
}

/* Grows the tree of a text from the logits and hidden states of its block. */
static void grow(const Model *m, Text *t, const Level *l, Node *nodes, const float *logits,
                 const float *hidden) {
  int64_t count = 0, first = 0, parents = 1;
  for (int64_t level = 0; level < t->depth && parents; level++) {
    const int64_t width = t->width[min(level, t->levels - 1)];
    const int64_t found = find_children(m, t, l, nodes, first, parents, level, min(width, t->count),
                                        logits + level * m->drafted, hidden + level * m->hidden);
    qsort(l->found, (size_t)found, sizeof(Node), by_score);
    first = count;
    for (int64_t i = 0; i < found && i < width && l->found[i].score > -INFINITY; i++, count++) {
      nodes[count] = l->found[i];
      nodes[count].order = count;
    }
    /* A child scores at most as much as its parent, and loses ties to nodes added before it. */
    double worst = -INFINITY;
    if (count >= t->nodes) {
      memcpy(l->found, nodes, (size_t)count * sizeof(Node));
      qsort(l->found, (size_t)count, sizeof(Node), by_score);
      worst = l->found[t->nodes - 1].score;
    }
    for (parents = 0; first + parents < count; parents++) {
      const double score = nodes[first + parents].score;
      if (!(worst < score && score >= t->min_score)) break;
    }
  }
  Node *best = l->found;
  memcpy(best, nodes, (size_t)count * sizeof(Node));
  qsort(best, (size_t)count, sizeof(Node), by_score);
  t->drafted = min(count, t->nodes);
  for (int64_t i = 0; i < t->drafted; i++) {
    t->token[i] = m->ids[best[i].row];
    t->chance[i] = exp(best[i].log);
    t->parent[i] = -1;
    for (int64_t j = 0; j < i; j++)
      if (best[j].order == best[i].parent) t->parent[i] = j;
  }
}

static int64_t grow_all(const Model *m, Text *const *texts, int64_t count, const float *logits,
                        const float *hidden) {
  int64_t wide = 1, deep = 1;
  for (int64_t t = 0; t < count; t++) {
    deep = max(deep, texts[t]->depth);
    for (int64_t i = 0; i < texts[t]->levels; i++) wide = max(wide, texts[t]->width[i]);
  }
  const int64_t size = (int64_t)sizeof(float), nodes = wide * max(wide, deep);
  float *features OWNED = allocate(wide * m->rank * size);
  float *scores OWNED = allocate(m->rank ? wide * m->drafted * size : 0);
  float *noise OWNED = allocate(2 * m->drafted * size);
  float *logs OWNED = allocate(wide * wide * size);
  int64_t *ids OWNED = allocate(wide * wide * (int64_t)sizeof(int64_t));
  void *scratch OWNED = allocate(m->rank ? linear_scratch(m->w2, wide) : 0);
  Node *found OWNED = allocate(nodes * (int64_t)sizeof(Node));
  Node *tree OWNED = allocate(wide * deep * (int64_t)sizeof(Node));
  if (!features || !scores || !noise || !logs || !ids || !scratch || !found || !tree)
    return OUT_OF_MEMORY;
  const Level level = {features, scores, noise, logs, ids, scratch, found};
  for (int64_t t = 0; t < count; t++)
    grow(m, texts[t], &level, tree, logits + t * m->levels * m->drafted,
         hidden + t * m->levels * m->hidden);
  return 0;
}

/* Drafts a tree for each of `count` texts. `table` has cosines and sines of all positions. Returns 0,
 * 1 when memory ran out, or 2 for an anchor outside of the vocabulary. */
int64_t paceline_draft(const Model *m, Text *const *texts, int64_t count, const float *table,
                       int64_t threads) {
  const Cache **caches OWNED = allocate(count * (int64_t)sizeof(Cache *));
  float *logits OWNED = allocate(count * m->levels * m->drafted * (int64_t)sizeof(float));
  float *hidden OWNED = allocate(count * m->levels * m->hidden * (int64_t)sizeof(float));
  if (!caches || !logits || !hidden) return OUT_OF_MEMORY;
  for (int64_t t = 0; t < count; t++) caches[t] = texts[t]->context;
  const Run run = {.threads = threads, .table = table, .sequences = count, .caches = caches,
                   .kv_type = m->kv_type, .inputs_bf16 = m->bf16};
  int64_t failed = add_states(m, texts, run);
  if (!failed) failed = run_blocks(m, texts, run, logits, hidden);
  return failed ? failed : grow_all(m, texts, count, logits, hidden);
}
