/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The image monitor: a chain as a range of memory.
 *
 * State of a page of the range          mapping                                   a load         a store
 * ------------------------------------  ----------------------------------------  -------------  -----------------------------
 * absent (no layer holds it)            anonymous, read-only                      zeros          trap: expansion
 * of a slab in state MINOR              the top file, writable, page by page      of what is own straight; else trap
 * held by an older layer or a base      that file, read-only                      memory speed   trap: copy-on-write
 * own, not yet mapped (slab is STALE)   as before it became own                   memory speed   trap: map
 * own, mapped                           the top file, writable                    memory speed   memory speed
 * of a slab in state UNMAPPED           nothing                                   trap           trap
 * of a slab in state BOUNCE             a copy in memory, read-only               memory speed   trap: as for what it is a copy of
 * of a slab that is WATCHED (but own,   anonymous, userfaultfd                    trap once      trap: as above
 *   mapped; see watch.c)
 *
 * A trap ends in resolve(): claim the guest slab, make the pages own, map them, release. It runs in
 * a signal handler or in the thread of the watch: no allocation, no lock, only system calls that
 * are safe there.
 */
#ifndef PCOW_MONITOR_MONITOR_H
#define PCOW_MONITOR_MONITOR_H

#include <pthread.h>

#include "chain/chain.h"
#include "monitor/ahead.h"
#include "monitor/density.h"
#include "monitor/engine.h"
#include "monitor/events.h"
#include "monitor/layout.h"
#include "monitor/slab_state.h"
#include "util/signals.h"

struct moved {
    uint8_t *address;
    size_t length;                     /* bytes, whole slabs */
};

/*
 * Page tables on their way out, see retire.c. The snapshot operation that fills it in hands it over
 * to the thread by due.
 */
struct retired {
    /* room for as many as there were used slabs when it was last filled */
    struct moved *moved;
    size_t room;                       /* atomic */
    size_t count, next;                /* next: the first that is not unmapped */
    bool due;
};

/* Do several threads trap? A hint, relaxed. */
struct trappers {
    uintptr_t last;                    /* names the thread of the last trap */
    /* one bit for each of the last traps: it was another thread's than the one before */
    uint8_t turns;
};

/* See gate.c. */
struct gate {
    unsigned inside;                   /* who look at the chain and change mappings; atomic */
    bool closed;                       /* atomic */
    struct interrupts interrupts;      /* of who has closed it, before */
};

struct slab_map {
    /* own pages that are mapped for stores; no lost one, but in class volatile */
    struct page_set writable;
    uint16_t pieces;                   /* upper bound of the memory mappings in this slab */
    uint8_t faults;                    /* traps so far, to judge how hot it is (saturates) */
    uint8_t recent;                    /* there was a trap since the thread last looked */
    uint8_t queued;                    /* the thread is asked to copy the rest; see below */
    uint8_t grown;                     /* traps that came to a cluster a second time (saturates) */
    /* the window of the last trap: page after it, pages; to notice a sequence */
    uint16_t run_end, run;
    /* what was not own was loaded from since the last snapshot: kept only if mappings are short */
    uint8_t loaded;
    struct slab_status status;         /* of what is not in writable */
    /*
     * system calls may access it, for good: the same; atomic. From the status on: all before
     * begins anew at times
     */
    uint8_t asked;
    /* among those that have mappings of their own, see vmas_begin() */
    uint8_t counted;
    uint16_t holes;                    /* of the mappings, those of zeros over holes */
    /*
     * it was mapped, and the kernel refused to map it anew: a system call that has looked up an own
     * page may still store to it
     */
    uint8_t refused;
};

/* Whoever has the claim stores it; the thread looks for those that are set without claims. */
static inline void slab_set_queued(struct slab_map *slab, bool queued)
{
    __atomic_store_n(&slab->queued, queued, __ATOMIC_RELAXED);
}

/* Of an access that was reported to the userfaultfd thread. */
typedef void uffd_serve_fn(struct pcow_map *map, uint64_t offset, bool write);

struct pcow_map {
    pcow_image *image;
    uint8_t *address;
    uint64_t size;
    uint8_t *reservation;              /* address is aligned inside it */
    size_t reservation_size;
    /* guest offsets; before and behind all of the reservation is mapped by us */
    struct hole {
        uint64_t from, to;
        bool wanted;                   /* the first layout goes on */
    } hole;
    const struct engine *engine;       /* the one in force */
    enum pcow_full_policy full_policy;
    /*
     * By guest slab; zero, and not touched, where nothing was ever stored to nor claimed
     * (chain_next_used()). What goes through all of them goes through those that are used.
     */
    struct slab_map *slabs;
    unsigned vmas, vma_budget;
    uint64_t slabs_counted;            /* atomic */
    bool serves_sigbus;                /* the program does, see pcow_map_options */
    /* the budget is that of all maps of the process, which the kernel's limit is for */
    bool shares_vmas;
    bool closing;                      /* waiters give up */
    /* pages of its files are, see pcow_map_lose(); stays once it is set */
    bool lost;
    /* a mapping could not be replaced: pages that are in no set may still be mapped for stores */
    bool unknown;
    struct gate gate;
    struct event_queue events;
    /*
     * PCOW_EVENT_WITHDRAWN is to be told; not queued, as it may not be dropped, and once is enough
     */
    bool withdrawn;
    struct ahead ahead;
    struct density density;
    struct trappers trappers;
    struct retired retired;
    struct pcow_map_stats stats;       /* counters, relaxed atomics */
    uint64_t bounced;                  /* slabs in state BOUNCE; relaxed */
    /* pages that pcow_map_resolve() had to serve; no traps, whoever asks counts them; relaxed */
    uint64_t asked;
    /* handlers of SIGSEGV that will look at this map again; atomic */
    unsigned traps_under_way;
    int uffd;
    pthread_t uffd_thread;
    bool uffd_running;
    uffd_serve_fn *uffd_serve;
    uint8_t *uffd_stop_page;
    pthread_mutex_t watch_lock;        /* of pcow_map_watch() against itself */
    bool watching;                     /* the store is still looked for */
    uint64_t watch_found;              /* offset + 1 of a store that could not be served; 0: none */
    void *of_engine;                   /* what the engine knows of this map */
    /* by enum slab_state; NULL: whoever serves a trap knows how; not beside what traps count up */
    const struct slab_keeper *keepers[SLAB_STATES];
};

/* monitor/find.c: lost pages, at which nothing is mapped */
bool lost_in_map(const struct pcow_map *map, uint64_t offset);     /* the claim is held */
/*
 * The pages of a guest slab without the lost ones among its own. The claim is held, or everybody
 * stopped. Async-signal-safe.
 */
void lost_take_out(const struct pcow_map *map, uint64_t guest_slab, struct page_set *pages);
/* After the protection of everything was changed; everybody is stopped. */
int lost_hide_again(const struct pcow_map *map);

/* monitor/reserve.c: the address space of the range */
int reserve_range(struct pcow_map *map, struct pcow_error *error);
void reserve_release(struct pcow_map *map);
/*
 * How these guest offsets are to be mapped: MAP_FIXED, or in the first layout, which maps one piece
 * after the other, MAP_FIXED_NOREPLACE; or a negative errno. in_steps: by more than one system
 * call, so that something of ours has to be there first. Once all is mapped: reserve_taken().
 */
int reserve_next(struct pcow_map *map, uint64_t from, uint64_t to, bool in_steps);
void reserve_taken(struct pcow_map *map, uint64_t to);
/* Nothing is mapped there (any more). Async-signal-safe but in the first layout. */
int reserve_again(struct pcow_map *map, uint64_t from, uint64_t to);

/* monitor/slab_map.c: of one slab; the claim is held. Async-signal-safe. */
/* 512, but fewer at the end of an image of format 1 */
unsigned layout_pages(const struct pcow_map *map, uint64_t guest_slab);
/* mappings that it needs, if it is not kept */
unsigned layout_count_pieces(const struct pcow_map *map, uint64_t guest_slab);
/* slab_enter(), and the copies in memory are counted. */
void layout_enter(struct pcow_map *map, uint64_t guest_slab, enum slab_state state);
/* pages of a cluster */
unsigned layout_cluster(const struct pcow_map *map);
static inline const struct slab_keeper *slab_keeper(const struct pcow_map *map,
                                                    uint64_t guest_slab)
{
    return map->keepers[slab_state(&map->slabs[guest_slab].status)];
}
static inline int slab_leave(struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_keeper *keeper = slab_keeper(map, guest_slab);

    return keeper && keeper->leave ? keeper->leave(map, guest_slab) : 0;
}
/*
 * Without the claim: somebody is about to have a system call access it. False: it has to be mapped
 * anew before, see resolve(). / Somebody was, and it is accessible for him.
 */
bool slab_ask(struct pcow_map *map, uint64_t guest_slab);
bool slab_was_asked(const struct pcow_map *map, uint64_t guest_slab);

/* monitor/flush.c: wait until nobody is about to map a part of the range anew. */
void flush_await_mapped(struct pcow_map *map, uint64_t offset, uint64_t end);

/*
 * monitor/retire.c: move the page tables of all that is mapped for stores out of the way, as far as
 * that is quicker than changing them; the mappings stay. Nobody stores to the range meanwhile;
 * loads fill them in again. The thread unmaps what was moved.
 */
void retire_tables(struct pcow_map *map);
bool retire_is_due(const struct pcow_map *map);
/* By the thread. True if there is more. */
bool retire_some(struct pcow_map *map);
/* All of the rest; the thread has ended. */
void retire_end(struct pcow_map *map);
/* By mlock(): new mappings would be filled, or would not be locked any more. */
bool retire_is_locked(const struct pcow_map *map);

/*
 * monitor/windows.c: by the thread, when nothing happens. False: something does, and not all was
 * given back.
 */
bool windows_empty(struct pcow_map *map);

/*
 * monitor/resolve.c. Async-signal-safe. Signals are blocked (util/signals.h). waiting: on a full
 * pool wait for space (by the map's policy) instead of -ENOSPC, with this mask; NULL: do not.
 */
int resolve(struct pcow_map *map, uint64_t offset, bool write, const signal_mask *waiting);
/*
 * monitor/store.c, for it: make the page own and map it for stores; alone: no other with it. The
 * claim is held.
 */
int resolve_store(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool alone);

/* monitor/holes.c: a load has failed. Async-signal-safe. The claim is held. */
enum holes_answer {
    HOLES_NONE,                        /* that was no hole of a pool in memory that is full */
    HOLES_SHOWN,                       /* it was, and can be loaded now */
    HOLES_UNRESOLVED,                  /* the slab traps, or may be behind the chain */
    HOLES_CHANGED,                     /* something else is mapped there */
};

enum holes_answer holes_show(struct pcow_map *map, uint64_t guest_slab, unsigned page);
/* So many pages from this one on are such a hole, and not mapped for stores. */
unsigned holes_at(const struct pcow_map *map, uint64_t guest_slab, unsigned page);
/* monitor/holes_serve.c. True: it may be tried again. Async-signal-safe. */
bool holes_serve(struct pcow_map *map, uint64_t offset);

/* monitor/gate.c. Signals are blocked between enter and leave. Async-signal-safe. */
void gate_enter(struct pcow_map *map);
void gate_leave(struct pcow_map *map);
/* For an operation. Blocks signals, and lets them through again. */
void gate_close(struct pcow_map *map);
void gate_open(struct pcow_map *map);

/*
 * monitor/dispatch.c: SIGSEGV in any map of the process, for every engine (copy-on-write of
 * read-only mappings), and SIGBUS
 */
int dispatch_prepare(struct pcow_error *error);      /* before any mapping of a map is counted */
int dispatch_register(struct pcow_map *map, struct pcow_error *error);
/* Is SIGBUS served by the library: was there nobody else? Until dispatch_end(). */
bool dispatch_serves_bus(void);
/*
 * No trap in this map is served any more, and none is under way when it returns. The handlers stay
 * for what else the library accesses: dispatch_end().
 */
void dispatch_leave(struct pcow_map *map);
void dispatch_end(void);

/* monitor/vmas.c. Async-signal-safe. */
/* Mappings that a map has more (or less) than before; what counts against its budget. */
void vmas_add(struct pcow_map *map, int change);
unsigned vmas_used(const struct pcow_map *map);
bool vmas_are_short(const struct pcow_map *map);
/*
 * A slab that is used for the first time. What is not used takes a mapping for each stretch of it:
 * at the most as many as there are used ones, and one more, or as there are others.
 */
void vmas_begin(struct pcow_map *map, struct slab_map *slab);
/* In a child of the process that had them. */
void vmas_forget_all(void);

/* monitor/uffd.c: userfaultfd for the watch. Idempotent; uffd_close() ends the thread. */
int uffd_open(struct pcow_map *map, struct pcow_error *error);
int uffd_start(struct pcow_map *map, uffd_serve_fn *serve_access, struct pcow_error *error);
void uffd_close(struct pcow_map *map);
/*
 * Anonymous memory whose first touch is reported, and every first store to a page that was copied
 * in.
 */
int uffd_map(const struct pcow_map *map, void *address, size_t length);
void uffd_wake(const struct pcow_map *map, void *address, size_t length);

/*
 * monitor/watch.c. Nobody looks for a store any more: the layer it was meant for is frozen or gone.
 */
void watch_forget(struct pcow_map *map);

/* For snapshot operations on a mapped image; nobody stores to the range meanwhile. */
int monitor_freeze(struct pcow_map *map, struct pcow_error *error);
/* every slab is UNMAPPED then */
int monitor_unmap_all(struct pcow_map *map, struct pcow_error *error);
int monitor_map_all(struct pcow_map *map, struct pcow_error *error);
/* The lists of the chain were built anew; lists: as they were before, or NULL. */
int monitor_map_changed(struct pcow_map *map, const struct layout_lists *lists,
                        struct pcow_error *error);

#endif
