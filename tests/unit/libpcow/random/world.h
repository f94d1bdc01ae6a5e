/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The random test of the monitor: what it is made of. world.c: one round, an image with its map and
 * what it must hold; guest.c: threads that load and store, and handlers that store; call.c: system
 * calls that store; beside.c: a thread that calls whatever it may, and a process that fills the
 * pool and reads the file; steps.c: what a round does; place.c: file systems of each class;
 * random.c: the rest.
 */
#ifndef PCOW_TEST_RANDOM_WORLD_H
#define PCOW_TEST_RANDOM_WORLD_H

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "pcow.h"

#define PAGE UINT64_C(4096)
#define PAGES_PER_SLAB ((unsigned)(PCOW_SLAB_SIZE / PAGE))
#define MAX_SLABS 8u
#define MAX_SNAPSHOTS 6u
#define GUESTS 2u
/*
 * Whose a page is, by its number modulo this: a guest's own, or the one that handlers in its thread
 * store to.
 */
#define SHARES 8u


struct saved {
    char name[32];
    uint8_t *bytes;
};

struct place {
    const char *name;
    const char *directory;             /* the pool */
    bool is_tmpfs;
    bool is_given;                     /* a directory of who calls, on a file system of its own */
    unsigned mebibytes;                /* of the pool at the beginning of a round */
};

struct world;

/* Of one guest, see call.c. */
struct call {
    uint8_t *source;                   /* a page */
    uint8_t data[PAGE];                /* what comes there */
    bool late;
    pthread_mutex_t busy;              /* of source, data and this */
    bool is_awaited;
    int fd;
    pthread_t thread;
    _Atomic bool stop;
};

struct guest {
    struct world *world;
    unsigned number;
    uint64_t seed, handler_seed;
    pthread_t thread;
    struct call call;
    volatile uint64_t at;              /* where it is: handlers store next to that */
    unsigned accesses;                 /* of the burst */
    uint64_t focus;                    /* guest slab that it keeps to; MAX_SLABS: none */
    bool sequential;
    _Atomic bool takes_signals;
    _Atomic unsigned in_handlers;
    _Atomic unsigned reached;          /* accesses that it is through with */
    _Atomic unsigned turn;             /* bursts that were asked for, */
    _Atomic unsigned done;             /* and are over */
};

struct world {
    const struct place *place;
    uint64_t seed;                     /* of the round, changes */
    uint64_t first_seed;
    unsigned round;
    unsigned slabs;
    uint64_t size;
    char path[512], base_path[512];
    bool has_base, copy_on_read;
    /* for system calls: a slab that was asked for is never in minor mode again */
    bool asks;
    enum pcow_engine engine;
    enum pcow_full_policy policy;
    unsigned budget;
    pcow_image *image;
    pcow_map *map;
    uint8_t *memory;                   /* the map's */
    uint8_t *bytes;                    /* what it must hold */
    struct saved saved[MAX_SNAPSHOTS];
    unsigned snapshots, next_name;
    struct guest guest[GUESTS];
    pid_t neighbour;
    pthread_t caller, ticker;
    _Atomic bool stop, hold_ticker;
    _Atomic uint64_t progress;
    const char *_Atomic doing;
};

/* Figures of all rounds. */
struct figures {
    _Atomic uint64_t rounds, steps, stores, loads, refused, waited, handled, called, verified;
    _Atomic uint64_t by_calls;
    enum pcow_persistence persistence;
};

extern struct figures figures;

uint64_t random_next(uint64_t *seed);
static inline uint64_t below(uint64_t *seed, uint64_t limit)
{
    return random_next(seed) % limit;
}

/*
 * Say what is wrong and how to come to it again, and end the process. Async-signal-safe but for the
 * format.
 */
_Noreturn void wrong(const struct world *world, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* world.c */
extern struct world *current_world;
void world_begin(struct world *world, const struct place *place, unsigned round, uint64_t seed);
void world_end(struct world *world);
void world_map(struct world *world);
void world_unmap(struct world *world);
/* Guests stand still, signals are blocked. */
void world_compare(struct world *world, bool by_memory);
void world_compare_slab(struct world *world, uint64_t slab);
void world_compare_snapshot(struct world *world, const struct saved *saved);

/* guest.c */
void guests_install_handlers(void);
void guest_start(struct guest *guest);
void guest_end(struct guest *guest);
/* Accesses of one guest, by its own thread, or the main one for the first. */
void guest_ask(struct guest *guest, unsigned accesses);
void guest_await(struct guest *guest);
void guest_run(struct guest *guest);
/* When it takes none any more, none is being handled. */
void guest_take_signals(struct guest *guest, bool take);

/* call.c */
void call_begin(struct call *call);
void call_end(struct call *call);
/* False: no space. */
bool call_store(const struct world *world, struct call *call, uint64_t at, uint64_t value);

/* beside.c */
void beside_start(struct world *world);
void beside_stop(struct world *world);
void pool_fill_but(const struct world *world, const char *name, unsigned pages);
void pool_empty(const struct world *world, const char *name);
void pool_remove(const char *directory, const char *name);

/* steps.c */
void step(struct world *world);

/* place.c */
bool place_make(struct place *place, const char *directory);

#endif
