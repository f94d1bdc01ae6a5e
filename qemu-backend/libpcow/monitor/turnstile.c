/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Between the thread that works ahead and the operations that want chain and layers for themselves.
 */
#include <time.h>

#include "monitor/monitor.h"
#include "util/order.h"

void turnstile_hold(struct pcow_map *map)
{
    __atomic_fetch_add(&map->ahead.waiting, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&map->ahead.busy);
    __atomic_fetch_sub(&map->ahead.waiting, 1, __ATOMIC_SEQ_CST);
    order_acquire(map);
}

void turnstile_take(struct pcow_map *map)
{
    static const struct timespec moment = {0, 20000};

    while (__atomic_load_n(&map->ahead.waiting, __ATOMIC_SEQ_CST) > 0)
        nanosleep(&moment, NULL);
    pthread_mutex_lock(&map->ahead.busy);
    order_acquire(map);
}

void turnstile_release(struct pcow_map *map)
{
    order_release(map);
    pthread_mutex_unlock(&map->ahead.busy);
}

uint64_t accesses_served(const struct pcow_map *map)
{
    return __atomic_load_n(&map->stats.write_traps, __ATOMIC_RELAXED)
           + __atomic_load_n(&map->stats.read_traps, __ATOMIC_RELAXED)
           + __atomic_load_n(&map->asked, __ATOMIC_RELAXED);
}
