/* Gated delta rule (Yang et al. 2024, arXiv 2412.06464) over trees, as Qwen3.5 has it: a short
 * causal convolution, then for each value head a state S [Dk, Dv] that every token changes:
 *
 *   S = decay S + k (beta (v - decay S^T k))^T,   out = norm(S^T q) * silu(z)
 *
 * A row continues from the state of its parent. The state of a text is always the result of the
 * same operations, token by token, in float32: the bits of a row do not depend on how the text was
 * divided into blocks, nor on the number of lanes, since each column of S is a chain of its own.
 *
 * With keys of width 0 there is no state: a layer is a gated short convolution (LFM2), whose rows
 * have factors on values in the place of queries and keys, and no betas and decays:
 *
 *   out = z * convolution(factors * values)
 *
 * Only the state behind the committed rows of a block is stored. Of drafted rows the inputs are
 * logged, and the accepted ones are run again, without outputs, by the next block. */
#ifndef PACELINE_DELTA_H
#define PACELINE_DELTA_H

#include "attention.h"
#include "rows.h"

/* A layer. Rows of its input: queries and keys [Hk Dk], values [Hv Dv], all before the convolution
 * (the channels), then betas and decays before their activations [Hv], then gates z [Hv Dv]. */
typedef struct {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  const float *convolution;  /* [taps, channels], the newest position's last */
  const float *rates, *bias; /* of decays: exp(-rate softplus(x + bias)) [Hv] */
  const float *norm;         /* [Dv] */
  double eps, beta;          /* of the norm; factor on betas */
} Delta;

/* States of a sequence, [layers, ...] each: before its first row (from), and of the run (to). */
typedef struct {
  int64_t start;              /* position of the first row of the run */
  int64_t replayed;           /* rows of from_log between the state and this position */
  int64_t from_rows, to_rows; /* rows that the logs have room for */
  const float *from, *from_window, *from_log;
  float *to, *to_window, *to_log; /* [Hv, Dk, Dv], [taps - 1, channels], [rows, channels + 2 Hv] */
} States;

INLINE int64_t delta_channels(const Delta *d) {
  const int64_t values = d->value_heads * d->value_dim;
  return d->key_dim ? 2 * d->key_heads * d->key_dim + values : 2 * values;
}

INLINE int64_t delta_parent(const QueryBlock *b, int64_t n) {
  if (!b->depths || n <= 0) return n - 1;
  const int32_t *end = b->paths + b->path_starts[n + 1];
  return b->path_starts[n + 1] - b->path_starts[n] > 1 ? end[-2] : -1;
}

/* The place of each drafted row's state, -1 for a row without children, which needs none; a last
 * child takes the place of its parent. Returns the number of places. */
INLINE int64_t delta_places(const QueryBlock *b, int64_t committed, int16_t *place) {
  int16_t last[MAX_TREE_NODES];
  CHECK(b->length <= MAX_TREE_NODES);
  int64_t count = 0;
  for (int64_t n = committed; n < b->length; n++) {
    last[n] = -1;
    const int64_t parent = delta_parent(b, n);
    if (parent >= committed) last[parent] = (int16_t)n;
  }
  for (int64_t n = committed; n < b->length; n++) {
    const int64_t parent = delta_parent(b, n);
    if (last[n] < 0)
      place[n] = -1;
    else if (parent >= committed && last[parent] == n)
      place[n] = place[parent];
    else
      place[n] = (int16_t)count++;
  }
  return count;
}

/* Floats of memory for the states of a block's drafted rows. */
INLINE int64_t delta_scratch(const Delta *d, const QueryBlock *b, int64_t committed) {
  int16_t place[MAX_TREE_NODES];
  if (committed >= b->length) return 0;
  return delta_places(b, committed, place) * (d->value_heads / d->key_heads) * d->key_dim *
         d->value_dim;
}

/* `lanes` vectors of columns of a state through one token; `to` null: only the output. */
INLINE void delta_columns(const float *from, float *to, int64_t key_dim, int64_t stride,
                          const float *k, const float *q, const float *v, float decay, float beta,
                          float *out, const int vectors) {
  vec sum[4], read[4];
#pragma GCC unroll 4
  for (int j = 0; j < vectors; j++) sum[j] = read[j] = splat(0.0f);
  for (int64_t i = 0; i < key_dim; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++)
      sum[j] = fma_(load_f32(from + i * stride + j * LANES), splat(k[i]), sum[j]);
#pragma GCC unroll 4
  for (int j = 0; j < vectors; j++)
    sum[j] = (load_f32(v + j * LANES) - sum[j] * splat(decay)) * splat(beta);
  for (int64_t i = 0; i < key_dim; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
      vec s = fma_(splat(k[i]), sum[j], load_f32(from + i * stride + j * LANES) * splat(decay));
      if (to) store_f32(to + i * stride + j * LANES, s);
      read[j] = fma_(s, splat(q[i]), read[j]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < vectors; j++) store_f32(out + j * LANES, read[j]);
}

/* silu of the convolution of `width` channels of a row and those before it. */
INLINE void delta_convolve(const Delta *d, const float *const *rows, int64_t first, int64_t width,
                           float *out) {
  const int64_t channels = delta_channels(d);
  for (int64_t i = 0; i < width; i += LANES) {
    vec sum = splat(0.0f);
    for (int64_t t = 0; t < d->taps; t++)
      sum = fma_(load_f32(d->convolution + t * channels + first + i), load_f32(rows[t] + first + i),
                 sum);
    store_f32(out + i, sum / (splat(1.0f) + exp_(-sum)));
  }
}

/* The output of `width` channels of a short convolution, from `first` on. */
INLINE void delta_short(const Delta *d, const float *const *rows, int64_t first, int64_t width,
                        float *out) {
  const int64_t values = d->value_heads * d->value_dim;
  for (int64_t i = first; i < first + width; i += LANES) {
    vec sum = splat(0.0f);
    for (int64_t t = 0; t < d->taps; t++)
      sum = fma_(load_f32(d->convolution + t * values + i),
                 load_f32(rows[t] + i) * load_f32(rows[t] + values + i), sum);
    store_f32(out + i, load_f32(rows[d->taps - 1] + 2 * values + i) * sum);
  }
}

INLINE void delta_unit(float *x, int64_t width, float factor) {
  const vec scale = splat(factor / sqrtf(sum_squares(x, width) + 1e-6f));
  for (int64_t i = 0; i < width; i += LANES) store_f32(x + i, load_f32(x + i) * scale);
}

INLINE float delta_decay(float x, float rate) {
  const float softplus = x > 20.0f ? x : (float)log_(1.0 + (double)exp_one(x));
  return exp_one(-rate * softplus);
}

/* One key head, and the value heads that share it, of a block's rows.
 *
 * in, out: rows of the batch, [width of in] and [Hv Dv]; committed: rows of the block that the
 * stored state will include; scratch: delta_scratch() floats. */
static void delta_block(const Delta *d, const States *states, int64_t layer, const QueryBlock *b,
                        int64_t committed, int64_t head, const float *in, float *out,
                        float *scratch) {
  const int64_t dk = d->key_dim, dv = d->value_dim, heads = d->value_heads,
                group = heads / d->key_heads;
  const int64_t channels = delta_channels(d), logged = channels + (dk ? 2 * heads : 0),
                width = logged + heads * dv;
  const int64_t size = dk * dv, key = dk ? dk : dv, all_keys = d->key_heads * key,
                head_v = head * group;
  const int64_t begins = b->start == states->start, replayed = begins ? states->replayed : 0;
  const float *log = states->from_log + layer * states->from_rows * logged;
  float *to_log = states->to_log + layer * states->to_rows * logged;
  float *to_window = states->to_window + layer * (d->taps - 1) * channels;
  const float *window = begins ? states->from_window + layer * (d->taps - 1) * channels : to_window;
  float *state = states->to + (layer * heads + head_v) * size;
  const float *from = states->from + (layer * heads + head_v) * size;
  const int64_t firsts[3] = {head * key, all_keys + head * key, 2 * all_keys + head_v * dv};
  const int64_t widths[3] = {key, key, dk ? group * dv : 0}; /* of channels */
  int16_t place[MAX_TREE_NODES];
  float q[MAX_DIM], k[MAX_DIM], v[MAX_DIM], read[MAX_DIM];
  CHECK(dk <= MAX_DIM && dv <= MAX_DIM && d->taps > 0 && d->taps <= MAX_TAPS);
  CHECK(committed >= 0 && committed <= b->length && b->length - committed <= states->to_rows);
  CHECK(replayed >= 0 && replayed <= states->from_rows);

  /* A row: of the block, or a replayed one, or one of the window before it. */
#define DELTA_ROW(n)                                       \
  ((n) >= 0              ? in + (b->row + (n)) * width     \
   : (n) + replayed >= 0 ? log + ((n) + replayed) * logged \
                         : window + (d->taps - 1 + (n) + replayed) * channels)
  if (begins && from != state) memcpy(state, from, (size_t)(group * size) * sizeof(float));
  if (committed < b->length) delta_places(b, committed, place);
  for (int64_t n = -replayed; n < b->length; n++) {
    const float *rows[MAX_TAPS];
    for (int64_t t = d->taps - 1, at = n; t >= 0; t--, at = delta_parent(b, at))
      rows[t] = DELTA_ROW(at);
    const float *x = rows[d->taps - 1];
    if (n >= committed) {
      float *saved = to_log + (n - committed) * logged;
      for (int part = 0; part < 3; part++)
        memcpy(saved + firsts[part], x + firsts[part], (size_t)widths[part] * sizeof(float));
      for (int64_t at = channels + head_v; at < logged; at += heads) /* betas, decays */
        memcpy(saved + at, x + at, (size_t)group * sizeof(float));
    }
    if (!dk) {
      if (n >= 0) delta_short(d, rows, firsts[0], dv, out + (b->row + n) * heads * dv);
      continue;
    }
    delta_convolve(d, rows, firsts[0], dk, q);
    delta_convolve(d, rows, firsts[1], dk, k);
    delta_unit(q, dk, 1.0f / sqrtf((float)dk));
    delta_unit(k, dk, 1.0f);
    const float *source = state;
    float *target = state;
    if (n >= committed) {
      const int64_t parent = delta_parent(b, n);
      if (parent >= committed) source = scratch + place[parent] * group * size;
      target = place[n] < 0 ? NULL : scratch + place[n] * group * size;
    }
    for (int64_t g = 0; g < group; g++) {
      const int64_t h = head_v + g;
      const float beta = (float)d->beta / (1.0f + exp_one(-x[channels + h]));
      const float decay = delta_decay(x[channels + heads + h] + d->bias[h], d->rates[h]);
      delta_convolve(d, rows, 2 * all_keys + h * dv, dv, v);
      int64_t i = 0;
      for (; i + 4 * LANES <= dv; i += 4 * LANES)
        delta_columns(source + g * size + i, target ? target + g * size + i : NULL, dk, dv, k, q,
                      v + i, decay, beta, read + i, 4);
      for (; i < dv; i += LANES)
        delta_columns(source + g * size + i, target ? target + g * size + i : NULL, dk, dv, k, q,
                      v + i, decay, beta, read + i, 1);
      if (n < 0) continue;
      const float *z = x + logged + h * dv;
      float *to = out + (b->row + n) * heads * dv + h * dv;
      normalise(read, d->norm, dv, (float)d->eps, read);
      for (i = 0; i < dv; i += LANES) {
        const vec gate = load_f32(z + i);
        store_f32(to + i, load_f32(read + i) * (gate / (splat(1.0f) + exp_(-gate))));
      }
    }
  }
  /* Rising, so that a window moves down in place. */
  for (int64_t t = 0; t < d->taps - 1; t++) {
    const float *x = DELTA_ROW(committed - (d->taps - 1) + t);
    for (int part = 0; part < 3; part++)
      memmove(to_window + t * channels + firsts[part], x + firsts[part],
              (size_t)widths[part] * sizeof(float));
  }
#undef DELTA_ROW
}

#endif
