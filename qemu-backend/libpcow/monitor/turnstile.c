/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Between the thread that works ahead and the operations that want chain and layers for themselves.
 */
#include <time.h>

#include "monitor/monitor.h"
#include "util/clock.h"
#include "util/order.h"

void turnstile_hold(struct pcow_map *map)
{
    __atomic_fetch_add(&map->ahead.waiting, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&map->ahead.busy);
    __atomic_fetch_sub(&map->ahead.waiting, 1, __ATOMIC_SEQ_CST);
    order_acquire(map);
}

/*
 * Whoever has prepared a snapshot freezes it soon. What others wait for is not held up for longer:
 * blocks that the pool lacks, the mirror.
 */
#define PREPARED_NS 60000000000u
/* While one is prepared: between two looks, at first and later on. */
#define FIRST_LOOK_NS 1000000
#define MAX_LOOK_NS 16000000

/* A step may wait for the medium, and who freezes, with the guest stopped, would wait for it. */
static bool freeze_is_near(const struct pcow_map *map)
{
    return __atomic_load_n(&map->image->making.step, __ATOMIC_RELAXED) == MAKING_RECORDED
           && clock_now_ns() - map->image->making.prepared_ns < PREPARED_NS
           && !ahead_is_stopping(&map->ahead);
}

void turnstile_take(struct pcow_map *map)
{
    static const struct timespec moment = {0, 20000};
    struct timespec look = {0, FIRST_LOOK_NS};

    for (;;) {
        while (__atomic_load_n(&map->ahead.waiting, __ATOMIC_SEQ_CST) > 0)
            nanosleep(&moment, NULL);
        pthread_mutex_lock(&map->ahead.busy);
        if (!freeze_is_near(map))
            break;
        pthread_mutex_unlock(&map->ahead.busy);
        nanosleep(&look, NULL);
        if (look.tv_nsec < MAX_LOOK_NS)
            look.tv_nsec *= 2;
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
