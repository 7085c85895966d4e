/* Drafts for several texts in one call.
 *
 * A block model (DSpark, section 3): new hidden states go to the contexts, one pass runs over all
 * blocks, and a tree grows from the logits of each block. A model of levels (LongSpec, section 3):
 * the newest tokens of the texts, then the nodes of their trees run through it level by level. With
 * states (EAGLE-3, section 3) a token is read with the state of the position before it: the
 * target's, or the model's own output. Its slot is that position.
 *
 * How a tree grows is said in paceline.drafter.growth.levels, whose trees these are. */
#include <math.h>
#include <stdlib.h>

#include "draft.h"
#include "sampling.h"

#define OWNED __attribute__((cleanup(release)))
#define MAX_ALLOCATIONS 16

enum { OUT_OF_MEMORY = 1 };

typedef struct {
  int64_t parent, row; /* row: of W1, which is the logit */
  double score, log;   /* logs of survival and confidence */
  int64_t order;       /* among equals; in a tree the number of the node */
} Node;

/* Allocations that are released together. Each is of its exact size, so that sanitizers see where
 * it ends. */
typedef struct {
  void *memory[MAX_ALLOCATIONS];
  int count, failed;
} Allocations;

static void release(Allocations *a) {
  while (a->count) free(a->memory[--a->count]);
}

static void *allocate(Allocations *a, int64_t count, size_t size) {
  void *memory = NULL;
  CHECK(count >= 0 && a->count < MAX_ALLOCATIONS);
  a->failed |= posix_memalign(&memory, 64, max(count, 1) * (int64_t)size);
  return a->memory[a->count++] = memory;
}

/* Memory for the chains of a pass. */
typedef struct {
  int64_t *position, *tile;
  QueryBlock *block;
} Chains;

/* Memory for chains of `rows` rows in all, or as many nodes. */
static Chains allocate_chains(Allocations *a, int64_t rows) {
  return (Chains){.position = allocate(a, rows, sizeof(int64_t)),
                  .tile = allocate(a, 3 * rows, sizeof(int64_t)),
                  .block = allocate(a, rows, sizeof(QueryBlock))};
}

static void add_chain(Run *r, const Chains *c, const Program *p, QueryBlock block) {
  const int64_t nodes = max(1, QUERY_TILE_ROWS / (p->q_heads / p->kv_heads));
  c->block[r->blocks] = block;
  for (int64_t node = 0; node < block.length; node += nodes) {
    int64_t *tile = c->tile + 3 * r->tiles++;
    tile[0] = r->blocks, tile[1] = node, tile[2] = min(nodes, block.length - node);
  }
  r->blocks++;
  r->rows += block.length;
}

static int64_t run_program(const Program *p, Run *r) {
  Allocations own OWNED = {0};
  r->memory = allocate(&own, paceline_program_bytes(p, r), 1);
  if (own.failed) return OUT_OF_MEMORY;
  return paceline_run_program(p, r);
}

/* Adds the new states of all texts to their contexts. */
static int64_t add_states(const Model *m, Text *const *texts, Run run) {
  const int64_t bytes = m->states * (m->bf16 ? 2 : 4);
  int64_t fresh = 0;
  for (int64_t t = 0; t < run.sequences; t++) fresh += texts[t]->length - texts[t]->first;
  if (!fresh) return 0;
  Allocations own OWNED = {0};
  const Chains chains = allocate_chains(&own, fresh);
  char *inputs = allocate(&own, fresh, (size_t)bytes);
  if (own.failed) return OUT_OF_MEMORY;
  run.position = chains.position, run.tile = chains.tile, run.block = chains.block;
  run.inputs = inputs;
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
                (QueryBlock){
                    .sequence = t, .start = at - text->base, .length = stop - at, .row = run.rows});
    }
  }
  return run_program(m->context, &run);
}

/* Paths of nodes that all are the first slot. */
static void fill_first_slot(int32_t *zeros, int32_t *starts, int64_t nodes) {
  for (int32_t i = 0; i < nodes; i++) zeros[i] = 0, starts[i] = i;
  starts[nodes] = (int32_t)nodes;
}

/* Runs the blocks of all texts: logits [texts, levels, drafted], hidden [texts, levels, hidden]. */
static int64_t run_blocks(const Model *m, Text *const *texts, Run run, float *logits,
                          float *hidden) {
  const int64_t rows = run.sequences * m->length, bytes = m->states * (m->bf16 ? 2 : 4);
  Allocations own OWNED = {0};
  const Chains chains = allocate_chains(&own, rows);
  int64_t *tokens = allocate(&own, rows, sizeof *tokens);
  int64_t *selection = allocate(&own, rows, sizeof *selection);
  int32_t *zeros = allocate(&own, m->length, sizeof *zeros);
  int32_t *starts = allocate(&own, m->length + 1, sizeof *starts);
  QueryBlock *contexts = allocate(&own, run.sequences, sizeof *contexts);
  char *inputs = allocate(&own, m->state_input ? rows : 0, (size_t)bytes);
  if (own.failed) return OUT_OF_MEMORY;
  fill_first_slot(zeros, starts, m->length);
  void *taps[] = {hidden};
  run.position = chains.position, run.tile = chains.tile, run.block = chains.block;
  run.tokens = tokens, run.selection = selection, run.inputs = m->state_input ? inputs : NULL;
  run.contexts = run.caches, run.context_block = contexts, run.context_type = run.kv_type;
  run.logits = logits, run.taps = taps;
  for (int64_t t = 0; t < run.sequences; t++) {
    const Text *text = texts[t];
    const int64_t start = text->length - text->base, first = run.rows;
    contexts[t] = (QueryBlock){t, start + m->length - 1, 1, first, zeros, zeros, starts};
    add_chain(&run, &chains, m->block,
              (QueryBlock){.sequence = t, .start = start, .length = m->length, .row = first});
    for (int64_t i = 0; i < m->length; i++) {
      chains.position[first + i] = text->length + i;
      tokens[first + i] = i ? m->mask : text->anchor;
      if (m->state_input) memcpy(inputs + (first + i) * bytes, text->newest, (size_t)bytes);
    }
    for (int64_t i = m->length - m->levels; i < m->length; i++)
      selection[run.selected++] = first + i;
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

/* A tree that grows: its nodes, and those of the last level that are expanded. */
typedef struct {
  Node *node;
  float *output; /* tap 0 at the anchor and the nodes that were fed */
  int64_t room, count, level, first, parents;
  int64_t trunk, fed; /* nodes below `fed` are in the cache; those of the trunk stay there */
} Tree;

/* Row of W1 of a node that is expanded. */
static int64_t row_of(const Text *t, const Tree *tree, int64_t parent) {
  return tree->level ? tree->node[tree->first + parent].row : t->row;
}

/* Finds `width` children of each expanded node from its logits, `stride` apart; returns how many.
 * `hidden` is for confidences. */
static int64_t find_children(const Model *m, const Text *t, const Level *l, const Tree *tree,
                             int64_t width, const float *logits, int64_t stride,
                             const float *hidden) {
  const float *scores = logits;
  const int64_t parents = tree->parents;
  if (m->rank) {
    Matrix w2 = *m->w2;
    w2.bias = logits;
    for (int64_t i = 0; i < parents; i++)
      memcpy(l->features + i * m->rank, m->w1 + row_of(t, tree, i) * m->rank,
             (size_t)m->rank * sizeof(float));
    paceline_linear(&w2, l->features, parents, l->scratch, l->scores);
    scores = l->scores, stride = m->drafted;
  }
  float *noise = t->temperature > 0 ? l->noise : NULL;
  const int64_t position = t->length + (m->text ? 2 : 1) + tree->level;
  if (noise) paceline_gumbel(t->seed, (uint64_t)position, m->ids, t->count, noise);
  paceline_candidates(scores, stride, parents, t->count, width, (float)t->temperature, noise,
                      l->ids, l->logs);
  double own = 0;
  for (int64_t i = 0; m->confidence && i < m->hidden; i++)
    own += (double)hidden[i] * m->confidence[i];
  int chain = 1;
  for (int64_t i = 0; i < t->levels; i++) chain &= t->width[i] == 1;
  int64_t found = 0;
  for (int64_t i = 0; i < parents; i++) {
    const int64_t parent = tree->level ? tree->first + i : -1, *ids = l->ids + i * width;
    const double above = parent < 0 ? 0 : tree->node[parent].score;
    const float *logs = l->logs + i * width;
    double change = 0;
    if (m->confidence && logs[0] > -INFINITY) {
      const double logit = own + (double)m->offsets[row_of(t, tree, i)];
      change = log_sigmoid(logit / (double)m->temperatures[tree->level]) - (double)logs[0];
      if (!chain) change = fmin(0, change); /* siblings are scaled together */
    }
    for (int64_t w = 0; w < width; w++, found++) {
      const double log = fmin(0, (double)logs[w] + change); /* rounding may leave it above 0 */
      l->found[found] = (Node){parent, ids[w], above + log, log, found};
    }
  }
  return found;
}

static int growing(const Text *t, const Tree *tree) {
  return tree->level < t->depth && tree->parents > 0;
}

/* Adds a level; arguments as of find_children. */
static void add_level(const Model *m, const Text *t, const Level *l, Tree *tree,
                      const float *logits, int64_t stride, const float *hidden) {
  const int64_t width = t->width[min(tree->level, t->levels - 1)];
  const int64_t found = find_children(m, t, l, tree, min(width, t->count), logits, stride, hidden);
  qsort(l->found, (size_t)found, sizeof(Node), by_score);
  const int64_t first = tree->count;
  for (int64_t i = 0; i < found && i < width && l->found[i].score > -INFINITY; i++) {
    CHECK(tree->count < tree->room);
    tree->node[tree->count] = l->found[i];
    tree->node[tree->count].order = tree->count;
    tree->count++;
  }
  /* A child scores at most as much as its parent, and loses ties to nodes added before it. */
  double worst = -INFINITY;
  if (tree->count >= t->nodes) {
    memcpy(l->found, tree->node, (size_t)tree->count * sizeof(Node));
    qsort(l->found, (size_t)tree->count, sizeof(Node), by_score);
    worst = l->found[t->nodes - 1].score;
  }
  tree->level++;
  tree->first = first;
  for (tree->parents = 0; first + tree->parents < tree->count; tree->parents++) {
    const double score = tree->node[first + tree->parents].score;
    if (!(worst < score && score >= t->min_score)) break;
  }
}

/* Writes the likeliest nodes as the result. */
static void finish(const Model *m, Text *t, const Level *l, const Tree *tree) {
  Node *best = l->found;
  memcpy(best, tree->node, (size_t)tree->count * sizeof(Node));
  qsort(best, (size_t)tree->count, sizeof(Node), by_score);
  t->drafted = min(tree->count, t->nodes);
  for (int64_t i = 0; i < t->drafted; i++) {
    t->token[i] = m->ids[best[i].row];
    t->chance[i] = exp(best[i].log);
    t->parent[i] = -1;
    for (int64_t j = 0; j < i; j++)
      if (best[j].order == best[i].parent) t->parent[i] = j;
  }
}

/* The nodes of a level that run through a model of levels: the newest tokens of a text, or its
 * nodes from the trunk to the last one that is expanded. */
static void add_nodes(const Model *m, const Text *t, const Tree *tree, int64_t sequence, Run *run,
                      const Chains *chains, int64_t *tokens, int64_t *selection, int32_t *path,
                      char *inputs) {
  const int64_t from = run->rows, lead = m->text ? 1 : 0; /* of positions over slots */
  const int64_t bytes = tree->level ? m->hidden * 4 : m->states * (m->bf16 ? 2 : 4);
  if (!tree->level) {
    if (m->text)
      memcpy(inputs + from * bytes, t->fresh, (size_t)((t->length + 1 - t->first) * bytes));
    for (int64_t at = t->first, stop; at <= t->length; at = stop) {
      stop = min(t->length + 1, (at / CHUNK + 1) * CHUNK); /* the same cuts however tokens come */
      for (int64_t i = at; i < stop; i++) {
        chains->position[run->rows + i - at] = i + lead;
        tokens[run->rows + i - at] = t->tokens[i - t->first];
      }
      add_chain(
          run, chains, m->block,
          (QueryBlock){
              .sequence = sequence, .start = at - t->base, .length = stop - at, .row = run->rows});
    }
  } else {
    const int64_t trunk = tree->trunk, count = tree->first + tree->parents - trunk;
    int32_t *depths = path, *starts = path + count, *paths = starts + count + 1, at = 0;
    int chain = 1;
    for (int64_t n = 0; n < count; n++) {
      const Node *node = tree->node + trunk + n;
      const int64_t parent = node->parent - trunk;
      const int32_t above = parent < 0 ? 0 : starts[parent + 1] - starts[parent];
      chain &= parent == n - 1 || (parent < 0 && !n);
      depths[n] = above, starts[n] = at;
      CHECK(parent < n);
      if (above) memcpy(paths + at, paths + starts[parent], (size_t)above * sizeof(int32_t));
      paths[at + above] = (int32_t)n;
      at += above + 1, starts[n + 1] = at;
      chains->position[from + n] = t->length + 1 + lead + trunk + above;
      tokens[from + n] = m->ids[node->row];
      if (m->text)
        memcpy(inputs + (from + n) * bytes, tree->output + (node->parent + 1) * m->hidden,
               (size_t)bytes);
    }
    QueryBlock block = {sequence, t->length + 1 + trunk - t->base, count, from, depths, paths,
                        starts};
    if (chain) block.depths = block.paths = block.path_starts = NULL;
    add_chain(run, chains, m->block, block);
  }
  for (int64_t i = run->rows - tree->parents; i < run->rows; i++) selection[run->selected++] = i;
}

/* Grows the trees of a model of levels, each level by one pass over those that grow. */
static int64_t grow_by_levels(const Model *m, Text *const *texts, int64_t count, Tree *trees,
                              const Level *level, Run run, int64_t wide, int64_t deep) {
  const int64_t nodes = wide * deep, width = m->text ? m->hidden : 0;
  int64_t rows = 0, longest = nodes;
  for (int64_t t = 0; t < count; t++) {
    const int64_t fresh = texts[t]->length + 1 - texts[t]->first;
    rows += max(nodes, fresh), longest = max(longest, fresh);
  }
  const int64_t paths = 2 * nodes + 1 + nodes * deep;
  Allocations own OWNED = {0};
  const Chains chains = allocate_chains(&own, rows);
  int64_t *tokens = allocate(&own, rows, sizeof *tokens);
  int64_t *selection = allocate(&own, rows, sizeof *selection);
  int32_t *path = allocate(&own, count * paths, sizeof *path);
  int32_t *zeros = allocate(&own, longest, sizeof *zeros);
  int32_t *starts = allocate(&own, longest + 1, sizeof *starts);
  QueryBlock *contexts = allocate(&own, rows, sizeof *contexts);
  const Cache **caches = allocate(&own, count, sizeof *caches);
  const Cache **targets = allocate(&own, count, sizeof *targets);
  float *logits = allocate(&own, count * wide * m->drafted, sizeof *logits);
  float *hidden = allocate(&own, count * wide * width, sizeof *hidden);
  float *outputs = allocate(&own, count * (nodes + 1) * width, sizeof *outputs);
  char *inputs = allocate(&own, m->text ? rows * max(m->states, width) : 0, sizeof(float));
  if (own.failed) return OUT_OF_MEMORY;
  for (int64_t t = 0; t < count; t++) trees[t].output = outputs + t * (nodes + 1) * width;
  void *taps[] = {hidden};
  if (m->text) run.inputs = inputs, run.taps = taps;
  fill_first_slot(zeros, starts, longest);
  run.position = chains.position, run.tile = chains.tile, run.block = chains.block;
  run.tokens = tokens, run.selection = selection, run.logits = logits;
  run.caches = caches, run.contexts = targets, run.context_block = contexts;
  run.context_type = run.kv_type;
  for (int64_t reading = 1;; reading = 0) {
    run.rows = run.blocks = run.tiles = run.selected = run.sequences = 0;
    for (int64_t t = 0; t < count; t++) {
      if (!growing(texts[t], trees + t)) continue;
      const int64_t sequence = run.sequences++, block = run.blocks;
      caches[sequence] = texts[t]->context, targets[sequence] = texts[t]->target;
      add_nodes(m, texts[t], trees + t, sequence, &run, &chains, tokens, selection,
                path + t * paths, inputs);
      for (int64_t b = block; b < run.blocks; b++)
        contexts[b] =
            (QueryBlock){sequence, texts[t]->slots - 1, 1, run.block[b].row, zeros, zeros, starts};
    }
    CHECK(run.rows <= rows && run.selected <= count * wide);
    if (!run.sequences) return 0;
    run.inputs_bf16 = reading && m->bf16;
    const int64_t failed = run_program(reading && m->text ? m->text : m->block, &run);
    if (failed) return failed;
    const float *at = logits, *out = hidden;
    for (int64_t t = 0; t < count; t++) {
      Tree *tree = trees + t;
      if (!growing(texts[t], tree)) continue;
      const int64_t parents = tree->parents, first = tree->level ? tree->first + 1 : 0;
      CHECK(first + parents <= nodes + 1);
      if (m->text)
        memcpy(tree->output + first * width, out, (size_t)(parents * width) * sizeof(float));
      if (tree->level) {
        tree->fed = tree->first + parents;
        if (tree->count == tree->level) tree->trunk = tree->fed; /* one node a level so far */
      }
      add_level(m, texts[t], level, tree, at, m->drafted, NULL);
      at += parents * m->drafted, out += parents * width;
    }
  }
}

/* Drafts from blocks, whose trees need no further pass. */
static int64_t grow_from_blocks(const Model *m, Text *const *texts, int64_t count, Tree *trees,
                                const Level *level, Run run) {
  Allocations own OWNED = {0};
  const Cache **caches = allocate(&own, count, sizeof *caches);
  float *logits = allocate(&own, count * m->levels * m->drafted, sizeof *logits);
  float *hidden = allocate(&own, count * m->levels * m->hidden, sizeof *hidden);
  if (own.failed) return OUT_OF_MEMORY;
  for (int64_t t = 0; t < count; t++) caches[t] = texts[t]->context;
  run.sequences = count, run.caches = caches;
  int64_t failed = add_states(m, texts, run);
  if (!failed) failed = run_blocks(m, texts, run, logits, hidden);
  for (int64_t t = 0; !failed && t < count; t++)
    while (growing(texts[t], trees + t)) {
      const int64_t row = t * m->levels + trees[t].level;
      add_level(m, texts[t], level, trees + t, logits + row * m->drafted, 0,
                hidden + row * m->hidden);
    }
  return failed;
}

static void check_draft(const Model *m, Text *const *texts, int64_t count) {
  CHECK(m && m->block && m->hidden > 0 && m->drafted > 0 && m->ids && count >= 0);
  CHECK(m->kv_type == KV_F32 || m->kv_type == KV_BF16);
  CHECK(!m->context || (m->length > 0 && m->levels > 0 && m->levels <= m->length && m->states > 0));
  CHECK(!m->rank || (m->w1 && m->w2));
  for (int64_t t = 0; t < count; t++) {
    const Text *text = texts[t];
    CHECK(text->base >= 0 && text->base % CHUNK == 0 && text->base <= text->first);
    CHECK(text->first <= text->length + 1 && text->count > 0 && text->count <= m->drafted);
    CHECK(text->levels > 0 && text->levels <= MAX_NODES && text->depth >= 0);
    CHECK(text->nodes > 0 && text->nodes <= MAX_NODES);
    CHECK(!m->context || text->depth <= m->levels);
    for (int64_t i = 0; i < text->levels; i++)
      CHECK(text->width[i] >= 0 && text->width[i] <= MAX_NODES);
  }
  (void)m, (void)texts, (void)count;
}

/* Drafts a tree for each of `count` texts. `table` has cosines and sines of all positions, as of
 * Run. Returns 0, 1 when memory ran out, or 2 for a token outside of the vocabulary. */
int64_t paceline_draft(const Model *m, Text *const *texts, int64_t count, const float *table,
                       int64_t tables, int64_t table_rows, int64_t threads) {
  check_draft(m, texts, count);
  CHECK(table && tables > 0 && table_rows > 0 && threads > 0);
  int64_t wide = 1, deep = 1;
  for (int64_t t = 0; t < count; t++) {
    deep = max(deep, texts[t]->depth);
    for (int64_t i = 0; i < texts[t]->levels; i++) wide = max(wide, texts[t]->width[i]);
  }
  const int64_t nodes = wide * deep;
  Allocations own OWNED = {0};
  const Level level = {
      .features = allocate(&own, wide * m->rank, sizeof(float)),
      .scores = allocate(&own, m->rank ? wide * m->drafted : 0, sizeof(float)),
      .noise = allocate(&own, 2 * m->drafted, sizeof(float)),
      .logs = allocate(&own, wide * wide, sizeof(float)),
      .ids = allocate(&own, wide * wide, sizeof(int64_t)),
      .scratch = allocate(&own, m->rank ? linear_scratch(m->w2, wide) : 0, 1),
      .found = allocate(&own, max(nodes, wide * wide), sizeof(Node)),
  };
  Node *all = allocate(&own, count * nodes, sizeof *all);
  Tree *trees = allocate(&own, count, sizeof *trees);
  if (own.failed) return OUT_OF_MEMORY;
  const Run run = {.threads = threads,
                   .table = table,
                   .tables = tables,
                   .table_rows = table_rows,
                   .kv_type = m->kv_type,
                   .inputs_bf16 = m->bf16};
  for (int64_t t = 0; t < count; t++)
    trees[t] = (Tree){.node = all + t * nodes, .room = nodes, .parents = 1};
  const int64_t failed = m->context
                             ? grow_from_blocks(m, texts, count, trees, &level, run)
                             : grow_by_levels(m, texts, count, trees, &level, run, wide, deep);
  for (int64_t t = 0; !failed && t < count; t++) finish(m, texts[t], &level, trees + t);
  return failed;
}
