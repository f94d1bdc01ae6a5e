/* SPDX-License-Identifier: BSD-3-Clause */
/* What the thread that works ahead gives back: what was prepared, and what others have left. */
#include "chain/reclaim.h"
#include "image/prepare.h"
#include "image/remains.h"
#include "monitor/ahead.h"
#include "monitor/monitor.h"
#include "util/clock.h"

/* slabs whose remains are punched out before somebody else may have a turn */
#define MAX_GIVEN_BACK 8u

/* In which a guest comes back to a slab that it uses. */
#define TRIM_NS 5000000000u

/* Was the guest here since the last look? */
static bool was_used(void *opaque, uint64_t guest_slab, uint64_t slab)
{
    struct pcow_map *map = opaque;
    struct slab_map *found = &map->slabs[guest_slab];

    if (!found->recent || map->image->slabs[slab].layer != image_active(map->image))
        return false;
    found->recent = 0;
    map->ahead.kept++;
    return true;
}

static void forget_opened(struct ahead *ahead)
{
    ahead->opened = ahead->kept = 0;
    ahead->trim_next = 0;
}

bool ahead_limit_opened(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;

    if (ahead->trim_next == 0) {
        if (ahead->opened + ahead->kept == 0
            || (ahead->opened < MAX_OPENED && clock_now_ns() - ahead->trimmed_ns < TRIM_NS))
            return false;
        forget_opened(ahead);
        ahead->trim_next = 1;
    }
    turnstile_take(map);
    if (!reclaim_unused(map->image, &ahead->trim_next, was_used, map))
        ahead->trim_next = 0;
    turnstile_release(map);
    if (ahead->trim_next)
        return true;
    ahead->trimmed_ns = clock_now_ns();
    /* What the file system was told must be certain before a slab is used again: not in a trap. */
    file_settle(&map->image->file);
    return false;
}

/* Nothing happened for a while: keep nothing that others could use. */
void ahead_give_back(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;

    lead_give_back(ahead);
    prepared_drop(map->image, ahead->lead_min);
    turnstile_take(map);
    reclaim_prepared(map->image);
    turnstile_release(map);
    forget_opened(ahead);
    ahead->holding = !windows_empty(map);
}

/*
 * Some of what snapshot operations and crashes have left, so that nobody waits for long. True if
 * there may be more.
 */
bool ahead_give_back_remains(struct pcow_map *map)
{
    struct pcow_image *image = map->image;

    if (!remains_are_due(image))
        return false;
    turnstile_take(map);
    reclaim(image, MAX_GIVEN_BACK);
    turnstile_release(map);
    if (remains_are_due(image))
        return true;
    file_settle(&image->file);
    return false;
}

/*
 * A slab at a time: the next snapshot, and who serves faults, may be waiting. True if there may be
 * more.
 */
bool ahead_give_back_frozen(struct pcow_map *map)
{
    struct ahead *ahead = &map->ahead;

    if (__atomic_exchange_n(&ahead->froze, false, __ATOMIC_ACQ_REL)) {
        ahead->frozen_next = 1;
        ahead->takers_since_ns = 0;
        /* What was handed out before is dealt with here. */
        forget_opened(ahead);
    }
    if (ahead->frozen_next == 0)
        return false;
    turnstile_take(map);
    if (!reclaim_frozen(map->image, &ahead->frozen_next))
        ahead->frozen_next = 0;
    turnstile_release(map);
    if (ahead->frozen_next)
        return true;
    file_settle(&map->image->file);
    return false;
}
