/* Noise, probabilities and candidates of tokens. Noise and probabilities have the same bits on
 * every machine with FMA. */
#include "sampling.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "vectors.h"

#define ROUNDS 10
#define LOW 0xFFFFFFFFu
#define WORDS (LANES / 2)
#define CHUNK_IDS 512
#define PIECE 64 /* scores that are skipped together if none is among the best so far */

/* Philox4x32-10 of WORDS counters (position, pair, 0): the low halves of `out` are its words w0 to
 * w3. kernels/noise.py defines the words of each id. */
INLINE void philox(uint64_t seed, uint64_t position, wvec pair, wvec out[4]) {
  const wvec none = {0}, one = none + 0xD2511F53u, two = none + 0xCD9E8D57u;
  wvec a = none + (position & LOW), b = none + (position >> 32), c = pair, d = none;
  uint64_t key = seed & LOW, other = seed >> 32;
#pragma GCC unroll 10
  for (int round = 0; round < ROUNDS; round++) {
    const wvec first = multiply_low(a, one), second = multiply_low(c, two);
    a = second >> 32 ^ b ^ key;
    b = second;
    c = first >> 32 ^ d ^ other;
    d = first;
    key = (key + 0x9E3779B9u) & LOW;
    other = (other + 0xBB67AE85u) & LOW;
  }
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* The 52-bit integers behind the noise of WORDS ids at one position. */
INLINE wvec mantissas_of(uint64_t seed, uint64_t position, wvec id) {
  wvec drawn[4];
  philox(seed, position, id >> 1, drawn);
  const wvec odd = -(id & 1);
  const wvec high = (drawn[0] & ~odd) | (drawn[2] & odd);
  const wvec low = (drawn[1] & ~odd) | (drawn[3] & odd);
  return (high & LOW) << 20 | (low & LOW) >> 12;
}

/* Those of `count` ids; a whole number of vectors is written. */
static void draw(uint64_t seed, uint64_t position, const int64_t *ids, int64_t count,
                 uint64_t *out) {
  const int64_t whole = count / WORDS * WORDS;
  wvec id = {0};
  for (int64_t i = 0; i < whole; i += WORDS) {
    memcpy(&id, ids + i, sizeof id);
    const wvec drawn = mantissas_of(seed, position, id);
    memcpy(out + i, &drawn, sizeof drawn);
  }
  if (whole == count) return;
  memcpy(&id, ids + whole, (size_t)(count - whole) * sizeof *ids);
  const wvec drawn = mantissas_of(seed, position, id);
  memcpy(out + whole, &drawn, sizeof drawn);
}

/* Gumbel noise -ln(-ln u), u = (mantissa + 0.5) 2^-52, rounded to float32. */
void paceline_gumbel(uint64_t seed, uint64_t position, const int64_t *ids, int64_t count,
                     float *out) {
  CHECK(count >= 0 && (!count || (ids && out)));
  uint64_t mantissas[CHUNK_IDS];
  for (int64_t at = 0; at < count; at += CHUNK_IDS) {
    const int64_t n = min(CHUNK_IDS, count - at);
    draw(seed, position, ids + at, n, mantissas);
    for (int64_t i = 0; i < n; i++)
      out[at + i] = (float)-log_(-log_(((double)mantissas[i] + 0.5) * 0x1p-52));
  }
}

/* The largest of `count` scores. */
static float largest(const float *x, int64_t count) {
  float lanes[WIDTH], best = -INFINITY;
  vec high = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) high = max_(high, load_f32(x + i));
  store_f32(lanes, high);
  for (int l = 0; l < LANES; l++) best = lanes[l] > best ? lanes[l] : best;
  for (; i < count; i++) best = x[i] > best ? x[i] : best;
  return best;
}

/* out[i] = 2^40 e^(x[i] - peak) in integers, as kernels/sampling.py defines it; returns their sum.
 * `peak` is finite, and no x is above it. */
static int64_t weigh(const float *x, int64_t count, float peak, int64_t *out) {
  const uint64_t one = 1u << 30, log2_e = 1549082005;
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    const float below = peak - x[i];
    const uint64_t nats = (uint32_t)(int32_t)((below < 31.0f ? below : 31.0f) * 0x1p25f);
    const uint64_t octaves = nats * log2_e >> 25, f = octaves & (one - 1);
    uint64_t p = 123394;
    p = 1386885 - (p * f >> 30);
    p = 10304738 - (p * f >> 30);
    p = 59591844 - (p * f >> 30);
    p = 257940802 - (p * f >> 30);
    p = 744261112 - (p * f >> 30);
    p = one - (p * f >> 30);
    out[i] = (int64_t)(p << 10 >> (octaves >> 30));
    total += out[i];
  }
  return total;
}

/* The weights of `count` x. The largest x must be finite. */
int64_t paceline_weights(const float *x, int64_t count, int64_t *out) {
  return weigh(x, count, largest(x, count), out);
}

/* ln of the sum of e^x: WIDTH partial sums in double, added up in pairs. `memory` is of `count`
 * values. The largest x must be finite. */
double paceline_logsumexp(const float *x, int64_t count, float *memory) {
  const float peak = largest(x, count);
  const vec shift = splat(peak);
  double part[WIDTH] = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_f32(memory + i, exp_(load_f32(x + i) - shift));
  if (i < count) store_part(memory, i, count - i, 0, exp_(load_part(x + i, count - i) - shift));
  for (i = 0; i < count; i++) part[i % WIDTH] += (double)memory[i];
  for (int half = WIDTH / 2; half; half /= 2)
    for (int l = 0; l < half; l++) part[l] += part[l + half];
  return (double)peak + log_(part[0]);
}

/* Puts x[i] into its place among the best. */
static void insert(const float *x, int64_t i, int64_t width, int64_t *ids, float *best) {
  int64_t at = width - 1;
  for (; at > 0 && x[i] > best[at - 1]; at--) {
    best[at] = best[at - 1];
    ids[at] = ids[at - 1];
  }
  best[at] = x[i];
  ids[at] = i;
}

/* Sum of exp(x - peak). Not inlined: the constants of exp_ need all registers. */
static __attribute__((noinline)) float sum_exponentials(const float *x, int64_t count, float peak) {
  float part[WIDTH];
  const int64_t whole = count / WIDTH * WIDTH;
  for (int l = 0; l < WIDTH; l += LANES) {
    vec sum = splat(0.0f);
    for (int64_t i = l; i < whole; i += WIDTH) sum = sum + exp_(load_f32(x + i) - splat(peak));
    store_f32(part + l, sum);
  }
  float sum = add_up(part);
  for (int64_t i = whole; i < count; i++) sum += expf(x[i] - peak);
  return sum;
}

/* Of each row of logits [rows, count], `stride` apart, or 0 where all rows are the same memory: ids
 * [rows, width] of the largest scores, best first, the lower id first where they are equal, and the
 * logs [rows, width] of their softmax. Scores are the logits or, with noise [2, count], whose
 * second row is overwritten, logits / temperature + noise. Where fewer than `width` scores are
 * above -inf, the others have arbitrary ids. */
void paceline_candidates(const float *logits, int64_t stride, int64_t rows, int64_t count,
                         int64_t width, float temperature, float *noise, int64_t *ids,
                         float *logs) {
  CHECK(logits && ids && logs && rows >= 0 && count > 0 && width > 0);
  CHECK(rows < 2 || stride == 0 || stride >= count);
  CHECK(!noise || temperature > 0);
  for (int64_t r = 0; r < rows; r++, logits += stride, ids += width, logs += width) {
    const float *scores = logits;
    if (noise) {
      float *perturbed = noise + count;
      for (int64_t i = 0; i < count; i++) perturbed[i] = logits[i] / temperature + noise[i];
      scores = perturbed;
    }
    for (int64_t w = 0; w < width; w++) {
      ids[w] = w;
      logs[w] = -INFINITY;
    }
    for (int64_t from = 0; from < count; from += PIECE) {
      const int64_t to = min(from + PIECE, count);
      if (!(largest(scores + from, to - from) > logs[width - 1])) continue;
      for (int64_t i = from; i < to; i++)
        if (scores[i] > logs[width - 1]) insert(scores, i, width, ids, logs);
    }
    const float peak = logs[0], total = peak + logf(sum_exponentials(scores, count, peak));
    for (int64_t w = 0; w < width; w++) logs[w] -= total;
  }
}

/* A token, its score before noise, and what it counts for when some are selected. */
typedef struct {
  float x;
  int32_t id;
  int64_t weight;
} Token;

/* The token with the largest noisy score so far, the lowest id of equal ones; -1: none. */
typedef struct {
  float score;
  int64_t id;
} Best;

static void consider(Best *best, float score, int64_t id) {
  if (score > best->score || (score == best->score && id < best->id)) *best = (Best){score, id};
}

/* The best of all tokens, whose largest score without noise is `peak`.
 *
 * The noise of u is at most -ln(1 - u), as -ln u is at least 1 - u. From r 2^-24 <= 1 - u, r the
 * complement of the first 24 bits of u, the exponent of r gives a bound in a few operations. Only
 * tokens that reach the best score so far with it take the logarithms: about twenty of a
 * vocabulary. Tokens that cannot reach it with any noise are not drawn. */
static int64_t best_of_all(const float *logits, int64_t count, float temperature, float peak,
                           uint64_t seed, uint64_t position) {
  const float octave = 0.693148f, most = 36.75f, lowest = -3.75f; /* bounds of ln 2 and of noise */
  Best best = {peak + lowest, -1};
  float x[CHUNK_IDS];
  uint32_t first[CHUNK_IDS]; /* bits of u */
  for (int64_t from = 0; from < count; from += CHUNK_IDS) {
    const int64_t n = min(CHUNK_IDS, count - from);
    for (int64_t i = 0; i < n; i++) x[i] = logits[from + i] / temperature;
    for (int64_t i = n; i < CHUNK_IDS; i++) x[i] = -INFINITY;
    if (largest(x, CHUNK_IDS) + most < best.score) continue;
    for (int64_t i = 0; i < CHUNK_IDS / 2; i += WORDS) { /* two ids are drawn together */
      wvec pair, drawn[4];
      for (int64_t w = 0; w < WORDS; w++) pair[w] = (uint64_t)(from / 2 + i + w);
      philox(seed, position, pair, drawn);
      const wvec both = (drawn[0] & LOW) | drawn[2] << 32;
      memcpy(first + 2 * i, &both, sizeof both);
    }
    for (int64_t piece = 0; piece < CHUNK_IDS; piece += PIECE) {
      int32_t reached[PIECE], any = 0;
      for (int64_t i = 0; i < PIECE; i++) {
        const float rest = (float)(int32_t)(~first[piece + i] >> 8);
        int32_t bits;
        memcpy(&bits, &rest, sizeof bits);
        reached[i] = x[piece + i] + octave * (float)(151 - (bits >> 23)) >= best.score;
        any |= reached[i];
      }
      for (int64_t i = 0; any && i < PIECE; i++) {
        const int64_t id = from + piece + i;
        float noise;
        if (!reached[i]) continue;
        paceline_gumbel(seed, position, &id, 1, &noise);
        consider(&best, x[piece + i] + noise, id);
      }
    }
  }
  return best.id;
}

static int64_t best_of(const Token *tokens, int64_t count, uint64_t seed, uint64_t position) {
  Best best = {-INFINITY, -1};
  int64_t ids[CHUNK_IDS];
  float noise[CHUNK_IDS];
  for (int64_t from = 0; from < count; from += CHUNK_IDS) {
    const int64_t n = min(CHUNK_IDS, count - from);
    for (int64_t i = 0; i < n; i++) ids[i] = tokens[from + i].id;
    paceline_gumbel(seed, position, ids, n, noise);
    for (int64_t i = 0; i < n; i++) consider(&best, tokens[from + i].x + noise[i], ids[i]);
  }
  return best.id;
}

/* Finds the tokens with scores of `bound` or more, of weight 1; returns how many. */
static int64_t gather(const float *logits, int64_t count, float temperature, float bound,
                      Token *found) {
  float x[PIECE];
  int64_t size = 0;
  for (int64_t from = 0; from < count; from += PIECE) {
    const int64_t n = min(PIECE, count - from);
    for (int64_t i = 0; i < n; i++) x[i] = logits[from + i] / temperature;
    if (largest(x, n) < bound) continue;
    for (int64_t i = 0; i < n; i++)
      if (x[i] >= bound) found[size++] = (Token){x[i], (int32_t)(from + i), 1};
  }
  return size;
}

/* The sum of the weights of all scores of `cut` or more. */
static int64_t weigh_all(const float *logits, int64_t count, float temperature, float cut,
                         float peak) {
  float x[CHUNK_IDS];
  int64_t weights[CHUNK_IDS], total = 0;
  for (int64_t from = 0; from < count; from += CHUNK_IDS) {
    const int64_t n = min(CHUNK_IDS, count - from);
    for (int64_t i = 0; i < n; i++) {
      const float score = logits[from + i] / temperature;
      x[i] = score >= cut ? score : -INFINITY;
    }
    total += weigh(x, n, peak, weights);
  }
  return total;
}

/* Sets the weights of tokens to their probabilities; returns the sum. */
static int64_t weigh_tokens(Token *tokens, int64_t count, float peak) {
  float x[CHUNK_IDS];
  int64_t weights[CHUNK_IDS], total = 0;
  for (int64_t from = 0; from < count; from += CHUNK_IDS) {
    const int64_t n = min(CHUNK_IDS, count - from);
    for (int64_t i = 0; i < n; i++) x[i] = tokens[from + i].x;
    total += weigh(x, n, peak, weights);
    for (int64_t i = 0; i < n; i++) tokens[from + i].weight = weights[i];
  }
  return total;
}

static void swap(Token *a, Token *b) {
  const Token other = *a;
  *a = *b, *b = other;
}

static int better(Token a, Token b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

/* Moves the best tokens to the front, as few as weigh `needed` together; returns how many. */
static int64_t select_best(Token *tokens, int64_t count, int64_t needed) {
  int64_t first = 0, last = count; /* those before are kept, those from there on are not */
  while (first < last) {
    swap(tokens + (first + last) / 2, tokens + last - 1);
    const Token pivot = tokens[last - 1];
    int64_t at = first, weight = 0;
    for (int64_t i = first; i < last - 1; i++) {
      if (!better(tokens[i], pivot)) continue;
      weight += tokens[i].weight;
      swap(tokens + at++, tokens + i);
    }
    if (weight >= needed) {
      last = at;
      continue;
    }
    swap(tokens + at, tokens + last - 1);
    needed -= weight + pivot.weight;
    first = at + 1;
    if (needed <= 0) break;
  }
  return first;
}

/* How much of the weight of all a nucleus needs. */
static int64_t share(int64_t total, double top_p) {
  const int64_t needed = (int64_t)ceil(top_p * (double)total);
  return needed < 1 ? 1 : min(total, needed);
}

/* The token that the sampling contract (kernels/sampling.py) names above temperature 0, after
 * penalties and bias. `count` is below 2^31. `min_p` is the log of the parameter, or -inf; `top_k`
 * is 0 and `top_p` 1 where they are off. Returns -1 if it is not decided here: the largest score is
 * not finite, a logit is NaN, or there is no memory. */
int64_t paceline_choose(const float *logits, int64_t count, float temperature, float min_p,
                        int64_t top_k, double top_p, uint64_t seed, uint64_t position) {
  CHECK(logits && count > 0 && count <= INT32_MAX && temperature > 0 && top_k >= 0);
  int64_t strange = 0;
  for (int64_t i = 0; i < count; i++) strange += !(logits[i] <= FLT_MAX);
  const float peak = largest(logits, count) / temperature, cut = peak + min_p;
  if (strange || !isfinite(peak)) return -1;
  const int ranked = top_k > 0 && top_k < count, nucleus = top_p < 1;
  if (!ranked && !nucleus && min_p == -INFINITY)
    return best_of_all(logits, count, temperature, peak, seed, position);
  Token *tokens = malloc((size_t)count * sizeof *tokens);
  if (!tokens) return -1;
  int64_t needed = top_k, kept = 0, weight;
  if (!ranked && nucleus) needed = share(weigh_all(logits, count, temperature, cut, peak), top_p);
  for (float reach = 8;; reach *= 2) { /* far fewer tokens than all are enough nearly always */
    const int all = peak - reach <= cut || reach > 64 || !(ranked || nucleus);
    kept = weight = gather(logits, count, temperature, all ? cut : peak - reach, tokens);
    if (!ranked && nucleus) weight = weigh_tokens(tokens, kept, peak);
    if (all || weight >= needed) break;
  }
  if (ranked || nucleus) kept = select_best(tokens, kept, needed);
  if (ranked && nucleus) {
    needed = share(weigh_tokens(tokens, kept, peak), top_p);
    kept = select_best(tokens, kept, needed);
  }
  const int64_t token = best_of(tokens, kept, seed, position);
  free(tokens);
  return token;
}
