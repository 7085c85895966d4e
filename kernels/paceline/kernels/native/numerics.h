/* Numerics of bfloat16 weights and caches in this process: 0 portable, the same bits on every
 * machine; 1 amx, products in tiles, which are emulated where the processor has none (for tests). */
#ifndef PACELINE_NUMERICS_H
#define PACELINE_NUMERICS_H

extern int amx_numerics;

#endif
