/* Parts of one piece of memory, one behind the other at multiples of 64 bytes.
 *
 * With AddressSanitizer there is a gap behind each part, and what reads or writes there ends the
 * process at once, as behind an allocation. Other builds have no gaps. */
#ifndef PACELINE_PARTS_H
#define PACELINE_PARTS_H

#include <stdint.h>

#include "check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GAP 64
#define FORBID(at, bytes) __asan_poison_memory_region(at, (size_t)(bytes))
#define ALLOW(at, bytes) __asan_unpoison_memory_region(at, (size_t)(bytes))
/* For instructions that the sanitizer does not know. */
#define CHECK_MEMORY(at, bytes) CHECK(!__asan_region_is_poisoned((void *)(at), (size_t)(bytes)))
#else
#define GAP 0
#define FORBID(at, bytes) ((void)(at), (void)(bytes))
#define ALLOW(at, bytes) ((void)(at), (void)(bytes))
#define CHECK_MEMORY(at, bytes) ((void)0)
#endif

typedef struct {
  void *memory;  /* null: parts are measured, and get no memory */
  int64_t bytes; /* of the parts so far, with their gaps */
} Parts;

/* The next part, with undefined content. Memory that had other parts before was allowed since. */
static inline void *add_part(Parts *p, int64_t bytes) {
  char *part = p->memory ? (char *)p->memory + p->bytes : 0;
  const int64_t all = (bytes + 63) / 64 * 64 + GAP;
  if (part) FORBID(part + bytes, all - bytes);
  p->bytes += all;
  return part;
}

/* Forbids what is behind the first `used` columns of rows of floats, `stride` apart. */
static inline void forbid_columns(float *table, int64_t rows, int64_t stride, int64_t used) {
  for (int64_t r = 0; GAP && table && r < rows; r++)
    FORBID(table + r * stride + used, (stride - used) * (int64_t)sizeof(float));
}

#endif
