/* Probes: scores of single rows, recorded while the attention runs. */
#ifndef PACELINE_ATTENTION_PROBES_H
#define PACELINE_ATTENTION_PROBES_H

#include "attention.h"

/* Floats of the scores of one query head that are kept for a probe, until their largest is known. */
static int64_t kept_row(const Plan *p, const Probe *probe) {
  return probe->weights ? round_up(p->block[probe->block].start, WIDTH) : 0;
}

/* Floats of the scores that are kept for all probes. */
static int64_t kept_floats(const Plan *p, const Probes *probes) {
  int64_t floats = 0;
  for (int64_t i = 0; i < probes->count; i++)
    floats += p->q_heads * kept_row(p, probes->probe + i);
  return floats;
}

/* Records scores of one row and chunk for its probes; hidden positions get -inf. */
static void note(const Tile *t, const float *row, int64_t r, int64_t base, int64_t from,
                 int64_t to) {
  const int64_t start = t->block->start, stop = least(base + CHUNK, start);
  const int64_t head = t->head * t->group + r % t->group;
  float *raw = t->raw;
  for (int64_t i = 0; i < t->probes->count; i++) {
    const Probe *probe = t->probes->probe + i;
    float *out = probe->weights ? raw + head * kept_row(t->plan, probe)
                                : probe->out + t->head * probe->stride;
    raw += t->plan->q_heads * kept_row(t->plan, probe);
    if (t->plan->block + probe->block != t->block || probe->node != t->node + r / t->group)
      continue;
    const int add = !probe->weights && r % t->group;
    for (int64_t at = base; at < stop; at++) {
      const float x = at - base >= from && at - base < to ? row[at - base] : -INFINITY;
      out[at] = add ? out[at] + x : x;
    }
  }
}

/* Writes the part of a probe that lies before the first chunk, and weights made of kept scores. */
static void finish_probe(const Tile *t, const Probe *probe, float *kept, const float *total) {
  const int64_t dim = t->plan->dim, start = t->block->start, stride = kept_row(t->plan, probe);
  const int64_t before = least(t->first * CHUNK, start);
  float *out = probe->out + t->head * probe->stride;
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
  for (int64_t i = 0; i < t->probes->count; i++) {
    const Probe *probe = t->probes->probe + i;
    const int64_t node = probe->node - t->node;
    if (t->plan->block + probe->block == t->block && node >= 0 && node * t->group < t->rows)
      finish_probe(t, probe, raw, total);
    raw += t->plan->q_heads * kept_row(t->plan, probe);
  }
}

#endif
