/* SPDX-License-Identifier: BSD-3-Clause */
/* How many slabs the thread that works ahead keeps ready. */
#include <time.h>

#include "image/prepare.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"

#define LEAD_MIN 4u                    /* slabs that are kept ready while the image is in use */
#define LEAD_TIME_NS 200000000u        /* or as many as were taken in such a time */
#define WINDOW_NS 100000000u           /* between two looks at how fast that is, and at how many can be taken */
#define MANY_TAKERS (4u * PREPARED_MAX)        /* not counted any further */

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static unsigned clamp(uint64_t value, unsigned low, unsigned high)
{
    return value > high ? high : value < low ? low : (unsigned)value;
}

void lead_begin(struct ahead *ahead, unsigned lead_min)
{
    ahead->lead = ahead->lead_min = clamp(lead_min, 0, PREPARED_MAX);
    ahead->rate_since_ns = now_ns();
}

void lead_give_back(struct ahead *ahead)
{
    __atomic_store_n(&ahead->lead, ahead->lead_min, __ATOMIC_RELAXED);
    ahead->rate_taken = ahead->idle_taken = ahead->seen_taken;
    ahead->rate_since_ns = now_ns();
}

/* Guest slabs that would need one at their next store. */
static unsigned count_takers(struct pcow_map *map)
{
    const struct pcow_image *image = map->image;
    unsigned takers = 0;

    turnstile_take(map);
    for (uint64_t v = 0; v < image->chain->guest_slabs && takers < MANY_TAKERS; v++) {
        slab_ref head = __atomic_load_n(&image->chain->head[v], __ATOMIC_ACQUIRE);

        takers += !head || slab_ref_level(head) != image->chain->levels
                  || image->slabs[slab_ref_slab(head)].layer != image_active(image);
    }
    turnstile_release(map);
    return takers;
}

/*
 * Where most guest slabs have one there is no use for many more; for a few, as a snapshot may come,
 * after which each needs another.
 */
static unsigned most_of_use(struct pcow_map *map, uint64_t taken, uint64_t now)
{
    struct ahead *ahead = &map->ahead;
    uint64_t since;

    if (now - ahead->takers_since_ns >= WINDOW_NS) {
        ahead->takers = count_takers(map);
        ahead->takers_since_ns = now;
        ahead->takers_taken = taken;
    }
    if (ahead->takers >= MANY_TAKERS)
        return PREPARED_MAX;
    since = taken - ahead->takers_taken;
    return clamp(ahead->takers > since ? ahead->takers - since : 0, LEAD_MIN, PREPARED_MAX);
}

void lead_judge(struct pcow_map *map)
{
    const struct prepared_ring *ring = map->image->ready;
    struct ahead *ahead = &map->ahead;
    uint64_t missed = __atomic_load_n(&ring->missed, __ATOMIC_RELAXED);
    uint64_t taken = __atomic_load_n(&ring->head, __ATOMIC_RELAXED)
                     - __atomic_load_n(&ring->dropped, __ATOMIC_RELAXED) + missed;
    uint64_t now = now_ns(), passed = now - ahead->rate_since_ns;
    unsigned lead = ahead->lead, most;

    /* What others drop from the ring just now may not count yet. */
    if (taken < ahead->seen_taken)
        taken = ahead->seen_taken;
    ahead->opened += (unsigned)(taken - ahead->seen_taken);
    if (passed >= WINDOW_NS) {
        lead = clamp((taken - ahead->rate_taken) * LEAD_TIME_NS / passed, 0, PREPARED_MAX);
        ahead->rate_since_ns = now;
        ahead->rate_taken = taken;
    }
    /* Too late already: do not wait for the end of the window. */
    if (missed != ahead->seen_missed)
        lead = clamp((uint64_t)lead * 2, 2 * LEAD_MIN, PREPARED_MAX);
    if (taken != ahead->idle_taken)
        lead = clamp(lead, LEAD_MIN, PREPARED_MAX);
    ahead->seen_taken = taken;
    ahead->seen_missed = missed;
    lead = clamp(lead, ahead->lead_min, PREPARED_MAX);
    most = lead > LEAD_MIN ? most_of_use(map, taken, now) : lead;
    __atomic_store_n(&ahead->lead, lead < most ? lead : most, __ATOMIC_RELAXED);
}
