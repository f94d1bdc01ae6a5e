/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What differs between the engines, and all that the rest of the monitor knows of one: each is a
 * file, engine_....c, and a row of the table in engine.c. All engines trap at stores to what is
 * mapped for loads (dispatch.c), as signal does, the one that adds nothing. What one may add is
 * states of a slab that only it understands (slab_is_kept()): its keeper serves them.
 *
 * No locks, no memory: but for prepare and close all of it is async-signal-safe, and the claim of
 * the slab is held, or everybody stopped.
 */
#ifndef PCOW_MONITOR_ENGINE_H
#define PCOW_MONITOR_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "pcow.h"

struct pcow_map;

/* Of a trap: what is done for any slab is to be done here, too. */
#define KEEPER_GO_ON 1

/* Serves slabs that are in certain states: struct pcow_map, keepers. */
struct slab_keeper {
    /* A trap. 0: it is served; or a negative errno; or KEEPER_GO_ON. */
    int (*serve)(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool write);

    /*
     * All of it is about to be mapped as the chain has it: nothing of it may be anywhere but in the
     * files then. 0, or a negative errno: it stays as it is. NULL: nothing ever is.
     */
    int (*leave)(struct pcow_map *map, uint64_t guest_slab);

    /* The others only where slab_is_kept(). Is this place of the file mapped at this page? */
    bool (*shows)(const struct pcow_map *map, uint64_t guest_slab, unsigned page, uint64_t offset);
    /* These pages have come into the set of what is mapped for stores: let them be accessed. */
    int (*page_ready)(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count);
    /* All pages are in it. */
    void (*whole)(struct pcow_map *map, uint64_t guest_slab);
    /* A snapshot has write-protected all of it, and emptied that set. */
    void (*freeze)(struct pcow_map *map, uint64_t guest_slab);
};

struct engine {
    enum pcow_engine number;
    /* what vCPUs store to stays mapped as it is: no page table takes the place of another */
    bool keeps_tables;
    /* an access to a slab that cannot be loaded from may be SIGBUS, and EFAULT in a system call: */
    bool traps_by_bus;
    bool must_be_asked;                /* so who has one access the range asks before */

    /*
     * Before the first layout. False: it cannot be had here, and the map gets engine signal. / The
     * range is unmapped; also where prepare has failed.
     */
    bool (*prepare)(struct pcow_map *map);
    void (*close)(struct pcow_map *map);
    /*
     * Could it keep this slab, as one mapping? / It does now; else all is as before, or mapped
     * anew. at_once: after the first trap already, as mappings are short.
     */
    bool (*can_keep)(const struct pcow_map *map, uint64_t guest_slab);
    bool (*keep)(struct pcow_map *map, uint64_t guest_slab, bool at_once);
};

/* The tables, one for each file. */
extern const struct engine engine_signal, engine_kvm, engine_minor;

/* NULL: there is no such engine. */
const struct engine *engine_find(enum pcow_engine number);

#endif
