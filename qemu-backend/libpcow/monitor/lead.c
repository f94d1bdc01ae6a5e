/* SPDX-License-Identifier: BSD-3-Clause */
/* How many slabs the thread that works ahead keeps ready. */
#include "image/prepare.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/clock.h"

#define MANY_TAKERS (4u * PREPARED_MAX)        /* not counted any further */

void lead_begin(struct ahead *ahead, unsigned lead_min)
{
    ahead->lead = ahead->lead_min = lead_min < PREPARED_MAX ? lead_min : PREPARED_MAX;
    ahead->rate_since_ns = clock_now_ns();
}

void lead_give_back(struct ahead *ahead)
{
    __atomic_store_n(&ahead->lead, ahead->lead_min, __ATOMIC_RELAXED);
    ahead->rate_taken = ahead->idle_taken = ahead->seen_taken;
    ahead->rate_since_ns = clock_now_ns();
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
static unsigned limit(struct pcow_map *map, unsigned lead, uint64_t taken, uint64_t now)
{
    struct ahead *ahead = &map->ahead;

    if (lead <= LEAD_MIN)
        return lead;
    if (now - ahead->takers_since_ns >= LEAD_WINDOW_NS) {
        ahead->takers = count_takers(map);
        ahead->takers_since_ns = now;
        ahead->takers_taken = taken;
    }
    return ahead->takers >= MANY_TAKERS
               ? lead
               : policy_lead_of_use(lead, ahead->takers, taken - ahead->takers_taken, PREPARED_MAX);
}

void lead_judge(struct pcow_map *map)
{
    const struct prepared_ring *ring = map->image->ready;
    struct ahead *ahead = &map->ahead;
    uint64_t missed = __atomic_load_n(&ring->missed, __ATOMIC_RELAXED);
    uint64_t taken = __atomic_load_n(&ring->head, __ATOMIC_RELAXED)
                     - __atomic_load_n(&ring->dropped, __ATOMIC_RELAXED) + missed;
    uint64_t now = clock_now_ns();
    struct policy_demand demand;
    unsigned lead;

    /* What others drop from the ring just now may not count yet. */
    if (taken < ahead->seen_taken)
        taken = ahead->seen_taken;
    ahead->opened += (unsigned)(taken - ahead->seen_taken);
    demand = (struct policy_demand){
        .lead = ahead->lead,
        .least = ahead->lead_min,
        .most = ahead_is_frugal(ahead) ? ahead->lead_min : PREPARED_MAX,
        .taken = taken - ahead->rate_taken,
        .passed_ns = now - ahead->rate_since_ns,
        .missed = missed != ahead->seen_missed,
        .in_use = taken != ahead->idle_taken,
    };
    if (demand.passed_ns >= LEAD_WINDOW_NS) {
        ahead->rate_since_ns = now;
        ahead->rate_taken = taken;
    }
    ahead->seen_taken = taken;
    ahead->seen_missed = missed;
    lead = limit(map, policy_lead(&demand), taken, now);
    __atomic_store_n(&ahead->lead, lead, __ATOMIC_RELAXED);
}
