/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshot create and revert change what every trap relies on: which layer is active, what is
 * mapped for stores, the chain. Nobody stores to the range meanwhile, but any thread may call
 * pcow_map_resolve() and others of that kind, and a load may trap. They come in here first: the
 * operation waits until all have left, and they until it is over. A delete leaves the gate open: it
 * claims one guest slab after the other.
 */
#include <time.h>

#include "monitor/monitor.h"

static const struct timespec moment = {0, 20000};

void gate_enter(struct pcow_map *map)
{
    for (;;) {
        /* Either this is seen by who closes it, or the closed gate here. */
        __atomic_fetch_add(&map->gate.inside, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&map->gate.closed, __ATOMIC_SEQ_CST))
            return;
        gate_leave(map);
        while (__atomic_load_n(&map->gate.closed, __ATOMIC_ACQUIRE))
            nanosleep(&moment, NULL);  /* the operation may be a thread's of lower priority */
    }
}

void gate_leave(struct pcow_map *map)
{
    __atomic_fetch_sub(&map->gate.inside, 1, __ATOMIC_SEQ_CST);
}

void gate_close(struct pcow_map *map)
{
    /* A handler in this thread would wait for itself. */
    map->gate.interrupts = interrupts_disable();
    __atomic_store_n(&map->gate.closed, true, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&map->gate.inside, __ATOMIC_SEQ_CST))
        nanosleep(&moment, NULL);
}

void gate_open(struct pcow_map *map)
{
    __atomic_store_n(&map->gate.closed, false, __ATOMIC_SEQ_CST);
    interrupts_restore(map->gate.interrupts);
}
