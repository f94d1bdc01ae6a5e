/* SPDX-License-Identifier: BSD-3-Clause */
/* When the mirror follows what was stored: a minute after it did, if a page was marked since. */
#include <stdlib.h>

#include "image/known.h"
#include "image/mirror_follow.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/clock.h"

#define INTERVAL_NS 60000000000u

void ahead_mirror_begin(struct pcow_map *map)
{
    const struct file *file = &map->image->file;

    if (!file->marked || file->persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        return;
    map->ahead.mirror.round = calloc(1, sizeof *map->ahead.mirror.round);
    map->ahead.mirror.interval_ns = INTERVAL_NS;
    map->ahead.mirror.last_ns = clock_now_ns();
}

void ahead_mirror_end(struct pcow_map *map)
{
    /* What was taken has no mark that the next one would look for. */
    if (map->ahead.mirror.round)
        mirror_end_round(&map->image->file, map->ahead.mirror.round);
    free(map->ahead.mirror.round);
    map->ahead.mirror.round = NULL;
}

static bool is_behind(const struct pcow_map *map)
{
    return map->ahead.mirror.round
           && mirror_marks(&map->image->file)
                  != __atomic_load_n(&map->ahead.mirror.marks, __ATOMIC_SEQ_CST);
}

/* 0: now. */
static uint64_t ns_left(const struct pcow_map *map)
{
    uint64_t interval = __atomic_load_n(&map->ahead.mirror.interval_ns, __ATOMIC_RELAXED),
             passed = clock_now_ns() - map->ahead.mirror.last_ns;

    return passed < interval ? interval - passed : 0;
}

bool ahead_follow_mirror(struct pcow_map *map)
{
    struct file *file = &map->image->file;
    struct mirror_round *round = map->ahead.mirror.round;
    bool more;

    if (!map->ahead.mirror.under_way) {
        if (!is_behind(map) || ns_left(map))
            return false;
        /* Before: what is marked meanwhile is the next one's. */
        __atomic_store_n(&map->ahead.mirror.marks, mirror_marks(file), __ATOMIC_SEQ_CST);
        map->ahead.mirror.under_way = true;
    }
    turnstile_take(map);
    more = mirror_take_pages(file, &(struct mirror_known){known_page, map->image}, round);
    turnstile_release(map);
    if (more)
        return true;
    more = round->count == MIRROR_ROUND_PAGES;
    /* What fails is tried again, and told by nobody: the page is as it would be without. */
    if (mirror_end_round(file, round) || round->left) {
        more = false;
        __atomic_fetch_sub(&map->ahead.mirror.marks, 1, __ATOMIC_SEQ_CST);
    }
    round->left = 0;
    map->ahead.mirror.under_way = more;
    map->ahead.mirror.last_ns = clock_now_ns();
    return more;
}

bool ahead_arm_mirror(struct pcow_map *map, struct timespec *limit)
{
    uint64_t ns = ns_left(map);
    bool armed;

    /* Either who marks a page sees that nobody looks for it, or it is seen here. */
    __atomic_store_n(&map->ahead.mirror.armed, false, __ATOMIC_SEQ_CST);
    armed = is_behind(map);
    __atomic_store_n(&map->ahead.mirror.armed, armed, __ATOMIC_SEQ_CST);
    *limit = (struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return armed;
}

bool ahead_mirror_waits(const struct pcow_map *map)
{
    return !__atomic_load_n(&map->ahead.mirror.armed, __ATOMIC_SEQ_CST) && is_behind(map);
}
