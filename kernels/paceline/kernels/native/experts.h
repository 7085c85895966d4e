/* Routed experts: each row goes to `top` experts and gets the weighted sum of what they return.
 *
 * Rows are spread into slots, one for each row and expert, sorted by expert. The slots of an expert
 * are a group, whose products are those of any linear layer. So a row's bits depend on its own
 * experts alone: on neither the other rows nor the groups. */
#ifndef PACELINE_EXPERTS_H
#define PACELINE_EXPERTS_H

#include "linear.h"
#include "vectors.h"

#define MAX_EXPERTS 1024 /* of a layer */

/* The slots of an expert. */
typedef struct {
  int64_t expert, first, count;
  int64_t scratch; /* offset of its prepared activations */
  int64_t item;    /* its first item of a product */
} Group;

typedef struct {
  int64_t groups;
  Group *group;  /* by rising expert */
  int64_t *row;  /* of every slot */
  int64_t *slot; /* of every row and rank: [rows, top] */
} Slots;

typedef struct {
  int64_t experts, top;
  int among;           /* shares are divided by the sum of those of the chosen experts */
  int sigmoid;         /* a share is the sigmoid of a score, not its part of the softmax over all */
  float factor;        /* on shares */
  float min_sum;       /* `among`: a smaller sum counts as this */
  const float *choice; /* added to shares to choose experts [experts]; null: scores choose */
  const float *factors; /* on shares, by expert [experts]; null: none */
} Routing;

/* Scores of all experts -> route [2 * top]: the best experts, the best first and the lower number
 * among equal ones; then their shares. */
INLINE void route_row(const Routing *r, const float *scores, float *route) {
  unsigned char taken[MAX_EXPERTS] = {0};
  float part[MAX_EXPERTS + WIDTH], wanted[MAX_EXPERTS], peak = scores[0], sum = 0.0f;
  const vec one = splat(1.0f);
  for (int64_t e = 1; e < r->experts; e++) peak = scores[e] > peak ? scores[e] : peak;
  for (int64_t e = 0; e < r->experts; e += LANES) {
    const vec x = load_part(scores + e, r->experts - e);
    if (r->sigmoid)
      store_f32(part + e, one / (one + exp_(-x)));
    else
      store_f32(part + e, exp_(x - splat(peak)));
  }
  for (int64_t e = 0; e < r->experts; e++) sum += part[e];
  if (r->sigmoid) sum = 1.0f;
  for (int64_t e = 0; e < r->experts; e++)
    wanted[e] = r->choice ? part[e] / sum + r->choice[e] : scores[e];
  for (int64_t k = 0; k < r->top; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < r->experts; e++)
      if (!taken[e] && (best < 0 || wanted[e] > wanted[best])) best = e;
    CHECK(best >= 0 && best < MAX_EXPERTS);
    taken[best] = 1;
    route[k] = (float)best;
  }
  if (r->among) {
    const float min_sum = sum * r->min_sum;
    sum = 0.0f;
    for (int64_t k = 0; k < r->top; k++) sum += part[(int64_t)route[k]];
    sum = sum < min_sum ? min_sum : sum;
  }
  for (int64_t k = 0; k < r->top; k++)
    route[r->top + k] = part[(int64_t)route[k]] / sum * r->factor;
  for (int64_t k = 0; r->factors && k < r->top; k++)
    route[r->top + k] *= r->factors[(int64_t)route[k]];
}

/* Sorts rows into slots by their routes [rows, 2 * top]; the rows of an expert stay in order. */
static void spread_rows(Slots *s, const float *routes, int64_t rows, int64_t top) {
  int64_t first[MAX_EXPERTS + 1] = {0};
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < top; k++) {
      const int64_t expert = (int64_t)routes[2 * r * top + k];
      CHECK(expert >= 0 && expert < MAX_EXPERTS);
      first[expert + 1]++;
    }
  s->groups = 0;
  for (int64_t e = 0; e < MAX_EXPERTS; e++) {
    if (first[e + 1])
      s->group[s->groups++] = (Group){.expert = e, .first = first[e], .count = first[e + 1]};
    first[e + 1] += first[e];
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < top; k++) {
      const int64_t slot = first[(int64_t)routes[2 * r * top + k]]++;
      s->row[slot] = r;
      s->slot[r * top + k] = slot;
    }
}

/* The last group that begins at or before a slot, or at or before an item of the product. */
static const Group *group_at(const Slots *s, int64_t at, int items) {
  int64_t low = 0, high = s->groups - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if ((items ? s->group[middle].item : s->group[middle].first) <= at)
      low = middle;
    else
      high = middle - 1;
  }
  return s->group + low;
}

/* Divides the activations, at most `room` bytes, and the items of a product with `matrix` [experts]
 * among the groups; returns the number of items. */
static int64_t divide_product(Slots *s, const Matrix *matrix, int64_t room) {
  int64_t items = 0, bytes = 0;
  for (Group *g = s->group; g < s->group + s->groups; g++) {
    g->item = items, g->scratch = bytes;
    items += linear_items(matrix + g->expert, g->count);
    bytes += (linear_scratch(matrix + g->expert, g->count) + 63) / 64 * 64;
  }
  CHECK(bytes <= room);
  (void)room;
  return items;
}

/* Bound of the activations of `slots` slots: tiles of a group are filled up with rows. */
static int64_t experts_scratch(const Matrix *matrix, int64_t experts, int64_t slots) {
  const int64_t groups = experts < slots ? experts : slots;
  return linear_scratch(matrix, slots) + groups * (16 * linear_scratch(matrix, 1) + 63);
}

/* out [width] = the sum of y [slot, width] of a row's slots times its shares, in order of rank. */
INLINE void combine_row(const float *y, const int64_t *slot, const float *share, int64_t top,
                        float *out, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    vec sum = splat(0.0f);
    for (int64_t k = 0; k < top; k++)
      sum = fma_(splat(share[k]), load_f32(y + slot[k] * width + i), sum);
    store_f32(out + i, sum);
  }
}

#endif
