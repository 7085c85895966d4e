/* The sizes of the structures that Python shares, as this compiler chose them, and the limits. See
 * structures.py, which compares them at load. */
#include <stddef.h>

#include "draft.h"

typedef struct {
  const char *structure; /* null: a field of the structure above */
  int64_t at, size;
} Line;

#define STRUCTURE(type) {#type, 0, sizeof(type)}
#define FIELD(type, field) {NULL, offsetof(type, field), sizeof(((type *)0)->field)}

/* One entry a line: clang-format would fill the lines. */
/* clang-format off */
static const Line lines[] = {
    STRUCTURE(Cache),
    FIELD(Cache, data),
    FIELD(Cache, head_stride),
    FIELD(Cache, slot_stride),
    FIELD(Cache, slots),
    STRUCTURE(QueryBlock),
    FIELD(QueryBlock, sequence),
    FIELD(QueryBlock, start),
    FIELD(QueryBlock, length),
    FIELD(QueryBlock, row),
    FIELD(QueryBlock, depths),
    FIELD(QueryBlock, paths),
    FIELD(QueryBlock, path_starts),
    STRUCTURE(Probe),
    FIELD(Probe, block),
    FIELD(Probe, node),
    FIELD(Probe, weights),
    FIELD(Probe, stride),
    FIELD(Probe, out),
    STRUCTURE(Probes),
    FIELD(Probes, count),
    FIELD(Probes, probe),
    STRUCTURE(Matrix),
    FIELD(Matrix, outs),
    FIELD(Matrix, ins),
    FIELD(Matrix, format),
    FIELD(Matrix, values),
    FIELD(Matrix, minima),
    FIELD(Matrix, scales_f16),
    FIELD(Matrix, offset),
    FIELD(Matrix, rotation),
    FIELD(Matrix, bias),
    FIELD(Matrix, tiles_bf16),
    STRUCTURE(Delta),
    FIELD(Delta, key_heads),
    FIELD(Delta, value_heads),
    FIELD(Delta, key_dim),
    FIELD(Delta, value_dim),
    FIELD(Delta, taps),
    FIELD(Delta, convolution),
    FIELD(Delta, rates),
    FIELD(Delta, bias),
    FIELD(Delta, norm),
    FIELD(Delta, eps),
    STRUCTURE(States),
    FIELD(States, start),
    FIELD(States, replayed),
    FIELD(States, from_rows),
    FIELD(States, to_rows),
    FIELD(States, from),
    FIELD(States, from_window),
    FIELD(States, from_log),
    FIELD(States, to),
    FIELD(States, to_window),
    FIELD(States, to_log),
    STRUCTURE(Operation),
    FIELD(Operation, kind),
    FIELD(Operation, in),
    FIELD(Operation, delta),
    FIELD(Operation, out),
    FIELD(Operation, layer),
    FIELD(Operation, window),
    FIELD(Operation, q_heads),
    FIELD(Operation, kv_heads),
    FIELD(Operation, bf16),
    FIELD(Operation, rope),
    FIELD(Operation, whole),
    FIELD(Operation, gelu),
    FIELD(Operation, experts),
    FIELD(Operation, among),
    FIELD(Operation, weight),
    FIELD(Operation, second),
    FIELD(Operation, eps),
    FIELD(Operation, factor),
    FIELD(Operation, limit),
    STRUCTURE(Buffer),
    FIELD(Buffer, width),
    FIELD(Buffer, extent),
    STRUCTURE(Program),
    FIELD(Program, operations),
    FIELD(Program, selecting),
    FIELD(Program, operation),
    FIELD(Program, buffers),
    FIELD(Program, buffer),
    FIELD(Program, vocabulary),
    FIELD(Program, q_heads),
    FIELD(Program, kv_heads),
    FIELD(Program, dim),
    FIELD(Program, top),
    FIELD(Program, products),
    FIELD(Program, scale),
    FIELD(Program, cap),
    STRUCTURE(Queries),
    FIELD(Queries, count),
    FIELD(Queries, row),
    FIELD(Queries, out),
    STRUCTURE(Run),
    FIELD(Run, rows),
    FIELD(Run, selected),
    FIELD(Run, threads),
    FIELD(Run, tokens),
    FIELD(Run, position),
    FIELD(Run, selection),
    FIELD(Run, table),
    FIELD(Run, table_rows),
    FIELD(Run, sequences),
    FIELD(Run, caches),
    FIELD(Run, kv_type),
    FIELD(Run, blocks),
    FIELD(Run, block),
    FIELD(Run, contexts),
    FIELD(Run, context_block),
    FIELD(Run, context_type),
    FIELD(Run, inputs),
    FIELD(Run, inputs_bf16),
    FIELD(Run, tiles),
    FIELD(Run, tile),
    FIELD(Run, logits),
    FIELD(Run, taps),
    FIELD(Run, taps_bf16),
    FIELD(Run, probes),
    FIELD(Run, queries),
    FIELD(Run, states),
    FIELD(Run, committed),
    FIELD(Run, nanoseconds),
    FIELD(Run, memory),
    STRUCTURE(Model),
    FIELD(Model, context),
    FIELD(Model, block),
    FIELD(Model, length),
    FIELD(Model, levels),
    FIELD(Model, hidden),
    FIELD(Model, states),
    FIELD(Model, text),
    FIELD(Model, state_input),
    FIELD(Model, bf16),
    FIELD(Model, kv_type),
    FIELD(Model, mask),
    FIELD(Model, drafted),
    FIELD(Model, ids),
    FIELD(Model, rank),
    FIELD(Model, w1),
    FIELD(Model, w2),
    FIELD(Model, confidence),
    FIELD(Model, offsets),
    FIELD(Model, temperatures),
    STRUCTURE(Text),
    FIELD(Text, context),
    FIELD(Text, base),
    FIELD(Text, first),
    FIELD(Text, length),
    FIELD(Text, fresh),
    FIELD(Text, tokens),
    FIELD(Text, newest),
    FIELD(Text, target),
    FIELD(Text, slots),
    FIELD(Text, anchor),
    FIELD(Text, row),
    FIELD(Text, count),
    FIELD(Text, temperature),
    FIELD(Text, seed),
    FIELD(Text, nodes),
    FIELD(Text, depth),
    FIELD(Text, levels),
    FIELD(Text, width),
    FIELD(Text, min_score),
    FIELD(Text, drafted),
    FIELD(Text, token),
    FIELD(Text, parent),
    FIELD(Text, chance),
};
/* clang-format on */

/* Writes the size of a structure, then offset and size of each of its fields, at most `room`
 * numbers. Returns how many; 0: there is no such structure. */
int64_t paceline_layout(const char *name, int64_t *numbers, int64_t room) {
  int64_t count = 0;
  int found = 0;
  for (size_t i = 0; i < sizeof lines / sizeof *lines && count + 2 <= room; i++) {
    const Line *line = lines + i;
    if (line->structure) {
      if (found) break;
      if ((found = !strcmp(line->structure, name))) numbers[count++] = line->size;
    } else if (found) {
      numbers[count++] = line->at;
      numbers[count++] = line->size;
    }
  }
  return count;
}

#define LIMIT(limit) {#limit, limit}

static const struct {
  const char *name;
  int64_t value;
} limits[] = {LIMIT(WIDTH),
              LIMIT(MAX_DIM),
              LIMIT(MAX_TREE_NODES),
              LIMIT(MAX_NODES),
              LIMIT(MAX_TAPS),
              LIMIT(MAX_ROTATED_INS),
              LIMIT(MAX_ROTATION),
              LIMIT(QUERY_TILE_ROWS),
              LIMIT(CHUNK),
              LIMIT(EMBED),
              LIMIT(INPUT),
              LIMIT(ADD_NORM),
              LIMIT(MULTIPLY),
              LIMIT(ROTATE),
              LIMIT(ATTEND),
              LIMIT(ATTEND_CONTEXT),
              LIMIT(GATE),
              LIMIT(ADD),
              LIMIT(TAP),
              LIMIT(SELECT),
              LIMIT(CAP),
              LIMIT(ROUTE),
              LIMIT(SPREAD),
              LIMIT(COMBINE),
              LIMIT(DELTA),
              LIMIT(SIGMOID_GATE),
              LIMIT(CONVOLVE),
              LIMIT(CHAINS),
              LIMIT(TILES),
              LIMIT(DOTS)};

/* A limit of limits.h, or the code of an operation of program.h, by its name; -1: there is none. */
int64_t paceline_limit(const char *name) {
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
    if (!strcmp(limits[i].name, name)) return limits[i].value;
  return -1;
}
