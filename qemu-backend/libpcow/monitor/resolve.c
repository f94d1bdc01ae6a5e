/* SPDX-License-Identifier: BSD-3-Clause */
/* What happens on a trap. Everything here is async-signal-safe. */
#include <errno.h>
#include <time.h>

#include "chain/index.h"
#include "chain/reclaim.h"
#include "image/spare.h"
#include "monitor/monitor.h"

#define WAIT_INTERVAL_NS 10000000L     /* between two tries on a full pool */

/* A load from memory where nothing is mapped. */
static int resolve_load(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    if (slab_is_unmapped(&slab->status)) {
        /*
         * To have it in one piece saves time or mappings. No load waits for space for that, nor
         * suffers for a page that it does not want.
         */
        return map->image->file.writable && layout_own_whole(map, guest_slab) == 0
                   ? layout_map_slab(map, guest_slab)
                   : bounce_slab(map, guest_slab);
    }
    /* A mapping has failed, and nothing is there for what is own. */
    if (slab_is_stale(&slab->status))
        return layout_map_slab(map, guest_slab);
    /* Another thread was here first, or KVM cannot load what lies in the file. */
    holes_show(map, guest_slab, page);
    return 0;
}

/* Nothing is claimed: whoever wants the thread meanwhile may have it. */
static void pause_between_tries(signal_mask mask)
{
    struct timespec interval = {0, WAIT_INTERVAL_NS};
    signal_mask blocked = signals_change(SIG_SETMASK, mask);

    nanosleep(&interval, NULL);
    signals_change(SIG_SETMASK, blocked);
}

static int resolve_once(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool write,
                        bool alone)
{
    const struct slab_keeper *keeper = slab_keeper(map, guest_slab);
    int ret;

    index_update(map->image, guest_slab);
    ret = keeper ? keeper->serve(map, guest_slab, page, write) : KEEPER_GO_ON;
    if (ret == KEEPER_GO_ON)
        ret = write ? resolve_store(map, guest_slab, page, alone)
                    : resolve_load(map, guest_slab, page);
    return ret || !write ? ret : layout_prepare_store(map, guest_slab, page);
}

static bool is_for_stores(const struct pcow_image *image)
{
    return image->file.writable && image->view == image_active(image);
}

int resolve(struct pcow_map *map, uint64_t offset, bool write, const signal_mask *waiting)
{
    uint64_t guest_slab = offset >> SLAB_BITS;
    unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB);
    bool told = false, reclaimed = false, lent = false;
    int ret;

    for (;;) {
        bool found = false;

        gate_enter(map);
        chain_claim(map->image->chain, guest_slab);
        ret = lost_in_map(map, offset) ? -EIO : resolve_once(map, guest_slab, page, write, lent);
        /*
         * Of an image that is open for writing it is the file system that refuses, after an error
         * of its own: that is no read-only memory.
         */
        if (ret == -EROFS && is_for_stores(map->image))
            ret = -EIO;
        chain_release(map->image->chain, guest_slab);
        if (ret == -ENOSPC && !reclaimed)
            found = reclaim_for_space(map->image);
        gate_leave(map);
        reclaimed |= ret == -ENOSPC;
        if (found)
            continue;
        if (ret != -ENOSPC || !waiting)
            break;
        /* Who would wait here may be whom the last snapshot needs. */
        lent = map->full_policy != PCOW_FULL_FAIL && spare_lend(map->image);
        if (lent) {
            /* Who keeps it fills it again when there is space, and sleeps. */
            ahead_wake(map);
            continue;
        }
        if (!told) {
            told = true;
            __atomic_fetch_add(&map->stats.pool_full_waits, 1, __ATOMIC_RELAXED);
            __atomic_fetch_add(&map->stats.stores_waiting, 1, __ATOMIC_SEQ_CST);
            events_post(&map->events, PCOW_EVENT_POOL_FULL, ret, offset);
        }
        if (map->full_policy == PCOW_FULL_FAIL || __atomic_load_n(&map->closing, __ATOMIC_RELAXED))
            break;
        /*
         * The claim is free meanwhile: other pages of this slab that are there already can be
         * mapped.
         */
        pause_between_tries(*waiting);
    }
    if (write && ahead_mirror_waits(map))
        ahead_wake(map);
    if (told && __atomic_sub_fetch(&map->stats.stores_waiting, 1, __ATOMIC_SEQ_CST) == 0
        && ret != -ENOSPC)
        events_post(&map->events, PCOW_EVENT_POOL_RESUMED, 0, offset);
    if (ret && ret != -ENOSPC)
        events_post(&map->events, PCOW_EVENT_ERROR, ret, offset);
    return ret;
}
