/* A program: the operations of a forward pass over numbered buffers, recorded once, run in one
 * call. */
#ifndef PACELINE_PROGRAM_H
#define PACELINE_PROGRAM_H

#include "attention.h"
#include "delta.h"
#include "experts.h"
#include "linear.h"
#include "rows.h"

enum {
  EMBED,
  INPUT,
  ADD_NORM,
  MULTIPLY,
  ROTATE,
  ATTEND,
  ATTEND_CONTEXT,
  GATE,
  ADD,
  TAP,
  SELECT,
  CAP,
  ROUTE,
  SPREAD,
  COMBINE,
  DELTA,
  SIGMOID_GATE,
  SCALE,
  CONVOLVE
};

/* One operation. Of the fields each kind uses some; `in`, `delta` and `out` are buffers.
 *
 * - EMBED: out = rows of the table `weight` [vocabulary, width of out], or of the Matrix `second`,
 *   times `factor`.
 * - INPUT: out = the caller's rows.
 * - ADD_NORM: in += delta * factor (delta 0: nothing); out = norm(in) * weight, or that of each
 *   `window` columns alone.
 * - MULTIPLY: out = in times the Matrix `weight`; over slots, each times that of its expert among
 *   `weight` [experts].
 * - ROTATE: out = rotated queries of the heads in `in`; their keys and values go to the caches of
 *   `layer`; there may be queries alone, or keys and values alone. `rope`, `q_rope`: which of the
 *   tables for keys, for queries; `whole`: the norms are over all queries and all keys together;
 *   `factors`: on rotated queries [dim], or null; `values`: norm of values, or null.
 * - ATTEND: out = attention of the queries in `in` over the caches of `layer`, with the sinks
 *   `weight` or without.
 * - ATTEND_CONTEXT: the same over the contexts, where all rows of a block attend to the same keys.
 * - GATE: out = silu(gate) * up, or gelu(gate) * up, or its form with a limit; `in` has gates and
 *   ups, or gates, whose ups are the columns of part `layer` of `delta`.
 * - ADD: in += delta * factor.
 * - TAP: copies `in` to the caller's buffer of `layer`, if there is one.
 * - SELECT: out = the rows of `in` that need logits.
 * - CAP: in = factor * tanh(in / factor).
 * - ROUTE: out = the experts of a row and their shares by the scores in `in`, with a `weight` that
 *   chooses and a `factor` on shares; see Routing in experts.h.
 * - SPREAD: out = the rows of `in` in slots by the routes `delta`.
 * - COMBINE: out = the sum of a row's slots in `in` by the routes `delta`.
 * - DELTA: out = the outputs of the Delta `weight` over the states of `layer`; see delta.h.
 * - SIGMOID_GATE: in *= sigmoid of the last columns of `delta`, or of its only one.
 * - SCALE: in *= factor.
 * - CONVOLVE: out = the causal convolution of `in` over `window` rows of each block, which are all
 * as long, by `weight` and the weights of convolution `layer` in `delta`; see rows.h. */
typedef struct {
  int64_t kind, in, delta, out, layer;
  int64_t window;                  /* of attention; 0: none; rows of CONVOLVE; columns of a norm */
  int64_t q_heads, kv_heads;       /* of `in` of ROTATE */
  int64_t bf16;                    /* type of the table of EMBED */
  int64_t rope, q_rope, whole;     /* of ROTATE */
  int64_t gelu;                    /* of GATE */
  int64_t experts, among, sigmoid; /* of ROUTE; experts: matrices of MULTIPLY over slots, or 0 */
  const void *weight,
      *second; /* second: norm of keys for ROTATE, whose `weight` is that of queries */
  const void *factors, *values; /* of ROTATE; factors: also of ROUTE, on shares by expert */
  double eps, factor, limit;    /* limit: of GATE, 0: none; min_sum of ROUTE */
} Operation;

/* A buffer is float32 [rows, width]. Buffer 0 is the caller's: the logits. */
typedef struct {
  int64_t width;
  int64_t extent; /* which rows it holds: */
} Buffer;

enum { ALL_ROWS, SLICE_ROWS, SELECTED_ROWS, SLOT_ROWS };

typedef struct {
  int64_t operations, selecting; /* the first operation over selected rows */
  const Operation *operation;
  int64_t buffers;
  const Buffer *buffer;
  int64_t vocabulary, q_heads, kv_heads, dim;
  int64_t top;       /* experts of a row */
  int64_t products;  /* of attention with bfloat16 caches; see attention.h */
  double scale, cap; /* of attention scores; cap 0: none */
} Program;

/* Request to copy queries of a layer: out [count, Hq, D]. */
typedef struct {
  int64_t count;
  const int64_t *row;
  float *out;
} Queries;

/* Arguments of one run. */
typedef struct {
  int64_t rows, selected, threads;
  const int64_t *tokens, *position; /* [rows]; no tokens without EMBED */
  const int64_t *selection;         /* rows that need logits [selected]; null: all */
  const float *table;               /* cosines and sines [kinds, table_rows, D] */
  int64_t tables, table_rows;       /* tables: kinds */
  int64_t sequences;
  const Cache *const *caches; /* of every sequence: [layers][keys, values] */
  int64_t kv_type;            /* KV_F32, KV_BF16 or KV_INT8 */
  int64_t blocks;
  const QueryBlock *block;
  const Cache *const *contexts; /* of every context: [layers][keys, values] */
  const QueryBlock
      *context_block; /* [blocks]: the rows of `block` as nodes that attend to a context */
  int64_t context_type;
  const void *inputs; /* of INPUT: [rows, width] */
  int64_t inputs_bf16;
  int64_t tiles;
  const int64_t *tile; /* [tiles, 3], in the order of blocks; see Plan */
  float *logits;
  void *const *taps; /* by layer: [rows, hidden]; null: not wanted */
  int64_t taps_bf16;
  const Probes *probes;     /* by layer; null: none */
  const Queries *queries;   /* by layer; null: none */
  const States *states;     /* of every sequence, for DELTA */
  const int64_t *committed; /* [blocks]: rows that DELTA stores the state of */
  int64_t *nanoseconds; /* by operation: the time of the stages that begin with it is added; null:
                           nobody asks */
  char *memory;         /* paceline_program_bytes() bytes, aligned to 64 */
} Run;

int64_t paceline_program_bytes(const Program *p, const Run *r);
int64_t paceline_run_program(const Program *p, const Run *r);

#endif
