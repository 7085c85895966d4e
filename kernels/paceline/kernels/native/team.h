/* Stages of work, divided among the threads of one parallel region.
 *
 * A stage is a number of items. Threads take items from a counter, and the thread that ends the last
 * item begins the next stage. Nobody waits for a thread that has taken nothing: one that the system
 * has stopped, or that comes late, delays no stage. */
#ifndef PACELINE_TEAM_H
#define PACELINE_TEAM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 1000 /* reads of the ticket, 20 to 50 us, before a waiting thread yields its core */
#define ITEM_BITS 20
#define MOST_ITEMS ((1 << ITEM_BITS) - 1024) /* of a stage: threads that find none count on */

/* What a team works on. */
typedef struct {
  /* Begins the next stage; returns its number of items, 1 .. MOST_ITEMS, or 0 at the end. */
  int64_t (*begin)(void *state);
  void (*work)(void *state, int64_t item);
  void *state;
} Stages;

typedef struct {
  _Atomic uint64_t ticket; /* number of the stage, its items, and the next item */
  _Atomic int64_t left;    /* items of the stage that are not counted as done */
} Team;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static inline uint64_t stage_of(const _Atomic uint64_t *ticket) {
  return atomic_load_explicit(ticket, memory_order_acquire) >> 2 * ITEM_BITS;
}

static void team_begin(Team *t, const Stages *stages, uint64_t stage) {
  const uint64_t items = (uint64_t)stages->begin(stages->state);
  atomic_store_explicit(&t->left, (int64_t)items, memory_order_relaxed);
  atomic_store_explicit(&t->ticket, stage << 2 * ITEM_BITS | items << ITEM_BITS,
                        memory_order_release);
}

/* Works until the last stage has ended. */
static void team_work(Team *t, const Stages *stages) {
  const uint64_t mask = (1 << ITEM_BITS) - 1;
  int64_t done = 0; /* items of the present stage that this thread has done */
  for (;;) {
    const uint64_t ticket = atomic_fetch_add_explicit(&t->ticket, 1, memory_order_acquire);
    const uint64_t item = ticket & mask, items = ticket >> ITEM_BITS & mask;
    const uint64_t stage = ticket >> 2 * ITEM_BITS;
    if (!items) return;
    if (item < items) {
      stages->work(stages->state, (int64_t)item);
      done++;
    } else if (done && atomic_fetch_sub_explicit(&t->left, done, memory_order_acq_rel) == done) {
      done = 0;
      team_begin(t, stages, stage + 1);
    } else {
      done = 0;
      for (int spins = 0; stage_of(&t->ticket) == stage; spins++)
        if (spins < SPINS)
          relax();
        else
          sched_yield();
    }
  }
}

/* Runs all stages on up to `threads` threads, the calling one included. */
static void team_run(const Stages *stages, int64_t threads) {
  _Alignas(64) Team team = {0};
  team_begin(&team, stages, 0);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
  team_work(&team, stages);
}

#endif
