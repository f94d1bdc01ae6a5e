/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The thread that works ahead of the guest's stores, one for each map of a writable image. It
 *
 *   keeps slabs prepared (image/prepare.h), as many as the observed rate asks for,
 *   keeps spare ones for the last snapshot of the guest (image/spare.h), if that is wanted,
 *   prepares the rest of slabs that were taken when none was ready,
 *   copies the rest of slabs that have proven hot, so that they become one mapping,
 *   gives back what was prepared and not used, when the image is idle or the pool short of space,
 *   and then page tables that nobody needs any more (windows.c),
 *   gives back what was prepared in slabs that a snapshot has frozen,
 *   gives back what snapshot operations and crashes have left (image/remains.h),
 *   unmaps the page tables that a snapshot or a revert has moved out of the way (retire.c),
 *   brings the mirror of the metadata up to date, once a minute (image/mirror_follow.h).
 *
 * It sleeps on a futex; traps wake it, and only when it has something to do.
 */
#ifndef PCOW_MONITOR_AHEAD_H
#define PCOW_MONITOR_AHEAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

struct pcow_map;

/* Power of two; guest slabs that wait for the thread; more are forgotten. */
#define AHEAD_QUEUE_SIZE 1024u

/* slabs (1 GiB) handed out with prepared pages, before those not in use are trimmed */
#define MAX_OPENED 512u
/*
 * Slabs that a fork of a VM takes before anything is prepared for it: the 2 MiB of each would be
 * fifty times what a child stores that answers a request and ends, and there are a hundred of them.
 */
#define FORK_SLABS 256u

struct ahead {
    pthread_t thread;
    bool running, stop;
    bool is_fork;                      /* the image stands on a snapshot, not on a template */
    /* held by the thread while it looks at the chain, and during snapshot operations */
    pthread_mutex_t busy;
    uint32_t waiting;                  /* others that want it */
    uint32_t wakeups;                  /* the futex */
    uint32_t sleeping;
    uint32_t queue[AHEAD_QUEUE_SIZE];  /* guest slab + 1; 0: empty */
    uint32_t queue_head, queue_tail;
    /* slabs that were queued because more copies may follow, and how many at the last look */
    uint32_t guesses, seen_guesses;
    bool expecting;                    /* the thread looks for more of them by itself */
    unsigned lead, lead_min;           /* slabs to keep ready: now, and never less */
    uint64_t seen_taken, seen_missed;  /* of the ring, at the last look */
    /* guest slabs that had no slab of the active layer when they were counted, */
    unsigned takers;
    uint64_t takers_since_ns, takers_taken;    /* which was then; slabs that were taken before */
    uint64_t rate_since_ns, rate_taken;
    uint64_t idle_accesses;            /* how many had been served at the last look for idleness */
    uint64_t idle_taken;               /* slabs taken when everything was given back */
    /* something was prepared since the last time that everything was given back */
    bool holding;
    bool forgot;                       /* slabs were dropped from the queue, nobody knows which */
    /* slabs with prepared pages have become those of a snapshot, which nobody will use any more */
    bool froze;
    uint64_t frozen_next;              /* the next slab to look at for that */
    /*
     * slabs with prepared pages that were handed out since the last trim began, those that it has
     * left as they were in use, and when it ended
     */
    unsigned opened, kept;
    uint64_t trimmed_ns;
    uint64_t trim_next;                /* the next slab that it looks at; 0: it is not under way */
    uint64_t prepared, completed;      /* statistics: slabs prepared, slabs copied whole */
    /* the mirror: see ahead_mirror.c */
    struct {
        struct mirror_round *round;    /* NULL: it does not follow */
        bool under_way;
        bool armed;                    /* the thread wakes up by itself */
        uint64_t marks;                /* that were made before the last round */
        uint64_t last_ns, interval_ns; /* the last round; atomic: between two */
    } mirror;
};

/* Begin / end to follow, by who has started the thread, and has it no more. */
void ahead_mirror_begin(struct pcow_map *map);
void ahead_mirror_end(struct pcow_map *map);
/* The thread's: true if there may be more to do. */
bool ahead_follow_mirror(struct pcow_map *map);
/* How long the thread may sleep for it; false: until somebody wakes it. */
bool ahead_arm_mirror(struct pcow_map *map, struct timespec *limit);
/* After a trap was served. Async-signal-safe. */
bool ahead_mirror_waits(const struct pcow_map *map);


/* Start / end the thread. Without it (no memory for one) everything works, but nothing is ahead. */
void ahead_start(struct pcow_map *map, unsigned lead_min);
void ahead_stop(struct pcow_map *map);
/* After it, when nobody traps any more: give back what is prepared. */
void ahead_end(struct pcow_map *map);

/*
 * After a trap was served in this guest slab, perhaps with a copy; its claim is held. comes_back:
 * for the first time to a cluster that another trap has begun, so that larger copies will follow.
 * Async-signal-safe.
 */
void ahead_served(struct pcow_map *map, uint64_t guest_slab, bool copied, bool comes_back);

/* Guest slabs that wait for the thread. */
unsigned ahead_queued(const struct pcow_map *map);

/* There is something to do. Async-signal-safe. */
void ahead_wake(struct pcow_map *map);
/*
 * A layer was frozen: what is prepared in its slabs is to be given back. / Is that still to be
 * done?
 */
void ahead_froze(struct pcow_map *map);
bool ahead_has_frozen(const struct pcow_map *map);

/* By the thread: is nothing prepared? */
static inline bool ahead_is_frugal(const struct ahead *ahead)
{
    return ahead->is_fork && ahead->seen_taken < FORK_SLABS;
}

static inline bool ahead_is_stopping(const struct ahead *ahead)
{
    return __atomic_load_n(&ahead->stop, __ATOMIC_ACQUIRE);
}

/* ---- ahead_queue.c, ahead_back.c: jobs of the thread; true if there may be more to do -------- */

/* The next guest slab that waits. */
bool ahead_serve_queue(struct pcow_map *map);
/*
 * Much was handed out, or some time ago: take it back from slabs that are not in use any more, one
 * at a time. A guest that is never quite idle, and a fork that stores little, would hold 2 MiB for
 * each page.
 */
bool ahead_limit_opened(struct pcow_map *map);
bool ahead_give_back_remains(struct pcow_map *map);
bool ahead_give_back_frozen(struct pcow_map *map);
/* Nothing happened for a while: keep nothing that others could use. */
void ahead_give_back(struct pcow_map *map);

/* ---- turnstile.c ----------------------------------------------------------------------------- */

/* Keep the thread away from chain and layers / let it go on. */
void turnstile_hold(struct pcow_map *map);
void turnstile_release(struct pcow_map *map);
/*
 * What the thread itself calls before a step, instead of turnstile_hold(): whoever waits is first.
 * A mutex alone goes to who comes by while the one that it has woken is on its way, and the next
 * step begins at once: a snapshot, with the guest stopped, waited for several of them. And while
 * one is prepared, until it is frozen or given up, for a minute at most, there is no step.
 */
void turnstile_take(struct pcow_map *map);
/*
 * Accesses of the guest that had to be served. What a KVM vCPU does never traps here: for that and
 * for devices the program asks.
 */
uint64_t accesses_served(const struct pcow_map *map);

/* ---- lead.c: by the thread, how many slabs should be ready ----------------------------------- */

void lead_begin(struct ahead *ahead, unsigned lead_min);
/* From how fast they are taken, and how many still can be. */
void lead_judge(struct pcow_map *map);
/* Nothing happened for a while: as few as when it began. */
void lead_give_back(struct ahead *ahead);

/* ---- ahead_slab.c: by the thread, to one guest slab, which is claimed for a few pages at a tim */

/* Prepare what is not valid in the file slab that it was given without. */
void ahead_complete_blocks(struct pcow_map *map, uint64_t guest_slab);
/* A hot slab: make the rest own, and then it is one mapping. */
void ahead_complete_pages(struct pcow_map *map, uint64_t guest_slab);
/*
 * Where the next copies will come from: into the page table of that file's window, so that they
 * need not wait for it. expected: that there will be any is more than a guess, so what is on a disk
 * is read, too.
 */
void ahead_touch_source(struct pcow_map *map, uint64_t guest_slab, bool expected);

#endif
