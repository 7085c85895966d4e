/* A drafter's model, and a text that it drafts for; see draft.c. */
#ifndef PACELINE_DRAFT_H
#define PACELINE_DRAFT_H

#include "program.h"

typedef struct {
  const Program *context; /* hidden states of the target to keys and values; null: of levels */
  const Program *block;   /* tokens to logits; of a block, tap 0 is what the LM head reads */
  int64_t length, levels; /* positions of a block; the last `levels` of them predict */
  int64_t hidden, states; /* width of tap 0, and of the states of a position */
  const Program *text;    /* tokens and states of a text to logits, of a model of levels, or null */
  int64_t state_input;    /* whether a block's positions read the newest states */
  int64_t bf16, kv_type;  /* type of states, and of contexts */
  int64_t mask;           /* token of the positions behind the anchor */
  int64_t drafted;        /* logits of a position */
  const int64_t *ids;     /* [drafted]: their token ids, rising */
  int64_t rank;           /* of the sequential head; 0: none */
  const float *w1;        /* [rows, rank]; row i is of logit i, the last one of other tokens */
  const Matrix *w2;
  const float *confidence;   /* [hidden]; null: no confidence head */
  const float *offsets;      /* [rows]: share of the token before in the logit of a confidence */
  const float *temperatures; /* [levels]: what this logit is divided by */
} Model;

typedef struct {
  const Cache *context;  /* [layers][keys, values] */
  int64_t base;          /* position of their first slot, a multiple of CHUNK */
  int64_t first, length; /* `length`: position of the anchor; what is from `first` on is new: */
  const char *fresh;     /* states [length - first, states], or with `text` one row more, ... */
  const int64_t *tokens; /* ... tokens [length + 1 - first] of a model of levels */
  char *newest;          /* states [states] of position length - 1; kept between calls */
  const Cache *target;   /* keys and values of the target that the model reads, or null */
  int64_t slots;         /* of `target` */
  int64_t anchor, row;   /* token at position `length`, and its row of W1 */
  int64_t count;         /* logits of which candidates are taken, the first ones */
  double temperature;    /* 0: scores are the logits, without noise */
  uint64_t seed;
  int64_t nodes, depth; /* at most */
  int64_t levels;
  int64_t width[MAX_NODES]; /* [levels]: nodes of a level; the last is of all deeper levels */
  double min_score;         /* nodes below it are not expanded */
  int64_t drafted;          /* the tree: its nodes, by falling survival */
  int64_t token[MAX_NODES], parent[MAX_NODES];
  double chance[MAX_NODES]; /* confidences */
} Text;

/* Drafts for some texts. Returns 0; 1 when memory ran out; 2 for a token outside of the vocabulary.
 */
int64_t paceline_draft(const Model *m, Text *const *texts, int64_t count, const float *table,
                       int64_t tables, int64_t table_rows, int64_t threads);

#endif
