/* Limits of what the kernels take, and how far ahead they fetch. Python reads the numbers: see
 * structures.py. */
#ifndef PACELINE_LIMITS_H
#define PACELINE_LIMITS_H

#define WIDTH 16              /* widths in memory are multiples of this, at every level */
#define MAX_DIM 512           /* values of a head */
#define MAX_TREE_NODES 256    /* rows of a query block that is a tree: nodes and anchor */
#define MAX_NODES 255         /* nodes of a drafted tree: without the anchor */
#define MAX_TAPS 8            /* positions of a convolution */
#define MAX_THREADS 256       /* threads of a team */
#define MAX_ROTATED_INS 66311 /* 255 * 127 times it is a number of 32 bits */
#define MAX_ROTATION 512      /* inputs that are rotated together */
#define QUERY_TILE_ROWS 256   /* query rows of a tile: their scores fit a second-level cache */
#define CHUNK 256             /* keys whose softmax is one step; see attention.c */

/* Bytes. Hardware does not follow the order of keys; weights are one stream, and are fetched far
 * ahead into the second-level cache: first-level caches have too few places for lines on their way.
 * Blocks move on to the first-level one. Floats are two streams, fetched there at once. */
#define KEYS_AHEAD 8192
#define WEIGHTS_AHEAD 8192
#define WEIGHTS_FAR_AHEAD 16384
#define BLOCKS_AHEAD 10240
#define BLOCKS_FAR_AHEAD 32768

#endif
