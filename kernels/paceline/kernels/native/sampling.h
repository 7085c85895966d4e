/* Noise and candidates of tokens; sampling.c has their definitions. */
#ifndef PACELINE_SAMPLING_H
#define PACELINE_SAMPLING_H

#include <stdint.h>

void paceline_gumbel(uint64_t seed, uint64_t position, const int64_t *ids, int64_t count,
                     float *out);
void paceline_candidates(const float *logits, int64_t stride, int64_t rows, int64_t count,
                         int64_t width, float temperature, float *noise, int64_t *ids, float *logs);

#endif
