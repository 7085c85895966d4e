/* Checks of what callers pass, in debug builds (PACELINE_CHECK): a wrong shape ends the process
 * here, with the condition, and not as a wrong value or a damaged heap later. Other builds have no
 * checks: Python has checked the same before. */
#ifndef PACELINE_CHECK_H
#define PACELINE_CHECK_H

#ifdef PACELINE_CHECK
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      abort();                                                                 \
    }                                                                          \
  } while (0)
#else
#define CHECK(condition) ((void)0)
#endif

#endif
