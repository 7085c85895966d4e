/* Stages of work, divided among the threads of one parallel region.
 *
 * A stage is a number of items. Each thread begins with a run of neighbouring items of its own,
 * then takes what is left of the other runs. So the weights of a run are one stream of memory, and
 * the same thread reads them in every step. The thread that ends the last item begins the next
 * stage. Nobody waits for a thread that has taken nothing: one that the system has stopped, or that
 * comes late, delays no stage. */
#ifndef PACELINE_TEAM_H
#define PACELINE_TEAM_H

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "check.h"
#include "limits.h"

#define SPINS 1000 /* reads of the ticket, 20 to 50 us, before a waiting thread yields its core */
#define ITEM_BITS 20
#define MAX_ITEMS ((1 << ITEM_BITS) - 1024) /* of a stage: threads that find none count on */
#define LAST ((1 << ITEM_BITS) - 1)         /* end of a run behind the last stage */

/* What a team works on. */
typedef struct {
  /* Begins the next stage; returns its number of items, 1 .. MAX_ITEMS, or 0 at the end. */
  int64_t (*begin)(void *state);
  void (*work)(void *state, int64_t item);
  void *state;
} Stages;

typedef struct {
  _Alignas(
      128) _Atomic uint64_t ticket; /* number of the stage, end of the run, and its next item */
} Items;

typedef struct {
  _Alignas(128) _Atomic int64_t left; /* items of the stage that are not counted as done */
  int64_t threads;
  Items *runs; /* by thread */
} Team;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static inline uint64_t stage_of(const Items *run) {
  return atomic_load_explicit(&run->ticket, memory_order_acquire) >> 2 * ITEM_BITS;
}

/* The last run is never empty, so the next stage cannot begin before all runs are written. */
static void team_begin(Team *t, const Stages *stages, uint64_t stage) {
  const uint64_t items = (uint64_t)stages->begin(stages->state), threads = (uint64_t)t->threads;
  CHECK(items <= MAX_ITEMS);
  atomic_store_explicit(&t->left, (int64_t)items, memory_order_relaxed);
  for (uint64_t i = 0; i < threads; i++) {
    const uint64_t first = items * i / threads, end = items ? items * (i + 1) / threads : LAST;
    atomic_store_explicit(&t->runs[i].ticket, stage << 2 * ITEM_BITS | end << ITEM_BITS | first,
                          memory_order_release);
  }
}

/* Works until the last stage has ended. */
static void team_work(Team *t, const Stages *stages, int64_t thread) {
  const uint64_t mask = (1 << ITEM_BITS) - 1;
  Items *own = t->runs + thread;
  for (;;) {
    uint64_t stage = stage_of(own);
    int64_t done = 0; /* items that this thread has done, not counted yet: their stage cannot end */
    for (int64_t i = 0; i < t->threads; i++) {
      Items *run = t->runs + (thread + i) % t->threads;
      for (;;) {
        const uint64_t ticket = atomic_fetch_add_explicit(&run->ticket, 1, memory_order_acquire);
        const uint64_t item = ticket & mask, end = ticket >> ITEM_BITS & mask;
        if (end == LAST) return;
        if (item >= end) break;
        stages->work(stages->state, (int64_t)item);
        stage = ticket >> 2 * ITEM_BITS;
        done++;
      }
    }
    if (done && atomic_fetch_sub_explicit(&t->left, done, memory_order_acq_rel) == done)
      team_begin(t, stages, stage + 1);
    else
      for (int spins = 0; stage_of(own) == stage; spins++)
        if (spins < SPINS)
          relax();
        else
          sched_yield();
  }
}

/* Runs all stages on up to `threads` threads, the calling one included. */
static void team_run(const Stages *stages, int64_t threads) {
  Items runs[MAX_THREADS];
  Team team = {.threads = threads < MAX_THREADS ? threads : MAX_THREADS, .runs = runs};
  team_begin(&team, stages, 0);
#pragma omp parallel num_threads((int)team.threads) if (team.threads > 1)
  team_work(&team, stages, omp_get_thread_num());
}

#endif
