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

/* A step may wait for the medium, and who freezes, with the guest stopped, would wait for it. */
static bool freeze_is_near(const struct pcow_map *map)
{
    return __atomic_load_n(&map->image->making.step, __ATOMIC_RELAXED) == MAKING_RECORDED
           && !ahead_is_stopping(&map->ahead);
}

void turnstile_take(struct pcow_map *map)
{
    static const struct timespec moment = {0, 20000}, while_prepared = {0, 1000000};

    for (;;) {
        while (__atomic_load_n(&map->ahead.waiting, __ATOMIC_SEQ_CST) > 0)
            nanosleep(&moment, NULL);
        pthread_mutex_lock(&map->ahead.busy);
        if (!freeze_is_near(map))
            break;
        pthread_mutex_unlock(&map->ahead.busy);
        nanosleep(&while_prepared, NULL);
    }
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
