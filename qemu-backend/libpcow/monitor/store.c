/* SPDX-License-Identifier: BSD-3-Clause */
/* A store to a page that is not mapped for stores. Everything here is async-signal-safe. */
#include <errno.h>

#include "image/prepare.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"

static bool has_page_in(const struct page_set *set, struct range range)
{
    unsigned end = range.first + range.count;

    return page_set_has(set, range.first) || page_set_run_end(set, range.first, end) < end;
}

/* Of a store to a page that is not mapped for stores. The claim is held. */
static struct policy_seen look(const struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    unsigned pages = layout_pages(map, guest_slab), cluster = layout_cluster(map),
             first = page / cluster * cluster;

    return (struct policy_seen){
        .pages = pages,
        .cluster = cluster,
        .page = page,
        .faults = slab->faults,
        .grown = slab->grown,
        .run_end = slab->run_end,
        .run = slab->run,
        .begun =
            has_page_in(&slab->writable,
                        (struct range){first, cluster < pages - first ? cluster : pages - first}),
        .present = chain_find(map->image, guest_slab, page, 1).present,
        .unmapped = slab_is_unmapped(&slab->status),
        .keepable = slab_is_kept(&slab->status) || map->engine->can_keep(map, guest_slab),
        .is_short = vmas_are_short(map),
        .dense = density_is_high(&map->density),
    };
}

/* Nothing older is on its list, so nothing has to be copied. */
static bool is_alone_on_list(const struct pcow_map *map, uint64_t guest_slab)
{
    slab_ref head = map->image->chain->head[guest_slab];

    return slab_ref_level(head) == map->image->chain->levels
           && map->image->slabs[slab_ref_slab(head)].next == 0;
}

static bool wants_rest(const struct pcow_map *map, uint64_t guest_slab,
                       const struct policy_seen *seen)
{
    return map->image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE
           && policy_wants_rest(seen, &map->slabs[guest_slab].writable)
           && is_alone_on_list(map, guest_slab);
}

/*
 * The first store to a slab that nothing below has, by a guest that was seen to fill such slabs;
 * and one is ready.
 */
static bool wants_whole(struct pcow_map *map, uint64_t guest_slab)
{
    return map->image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE
           && !map->image->chain->head[guest_slab] && density_begin_slab(&map->density)
           && map->image->ready && prepared_count(map->image) > 0;
}

/*
 * Own pages of a slab that was there when the image was opened have blocks before they are mapped
 * for stores. *alone: there is no space for all that lack one, or some cannot be read, which those
 * that are shared with a copy must be; so only this page may be mapped.
 */
static int back_own(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool *alone)
{
    bool changed;
    int ret = chain_back(map->image, guest_slab, 0, PAGES_PER_SLAB, &changed);

    *alone = ret == -ENOSPC || ret == -EIO;
    if (*alone)
        return chain_back(map->image, guest_slab, page, 1, &changed);
    return ret || !changed || slab_is_unmapped(&map->slabs[guest_slab].status)
               ? ret
               : layout_map_slab(map, guest_slab);
}

/*
 * The whole slab or the rest of it, where that seems worth it. -EAGAIN: it does not, or cannot be
 * had.
 */
static int resolve_all(struct pcow_map *map, uint64_t guest_slab, const struct policy_seen *seen)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    bool whole = wants_whole(map, guest_slab);
    int ret;

    if ((!whole && !wants_rest(map, guest_slab, seen))
        || layout_own(map, guest_slab, 0, seen->pages, NULL))
        return -EAGAIN;
    if (!whole)
        density_completed(&map->density);
    ret = layout_map_rest(map, guest_slab);
    if (slab->faults < UINT8_MAX)
        slab->faults++;
    if (whole && !ret)
        ahead_served(map, guest_slab, false, false);
    return ret;
}

static void note_thread(struct trappers *trappers)
{
    /* each thread has its own, and asking for it allocates nothing */
    uintptr_t thread = (uintptr_t)&errno;
    bool other = __atomic_exchange_n(&trappers->last, thread, __ATOMIC_RELAXED) != thread;

    __atomic_store_n(&trappers->turns,
                     (uint8_t)(__atomic_load_n(&trappers->turns, __ATOMIC_RELAXED) << 1 | other),
                     __ATOMIC_RELAXED);
}

static void try_to_keep(struct pcow_map *map, uint64_t guest_slab, enum policy_keep keep)
{
    if (keep != POLICY_KEEP_NOT && !slab_is_kept(&map->slabs[guest_slab].status))
        map->engine->keep(map, guest_slab, keep == POLICY_KEEP_AT_ONCE);
}

/*
 * What a sequence will touch next; or the page, which brings its neighbours with it and saves the
 * fault of the store.
 */
static void populate(struct pcow_map *map, uint64_t guest_slab, const struct policy_seen *seen,
                     struct range range)
{
    if (policy_fills_window(seen, range))
        layout_populate(map, guest_slab, range.first, range.count);
    else if (density_wants(&map->density,
                           map->address + (guest_slab << SLAB_BITS) + range.first * PCOW_PAGE_SIZE,
                           range.count))
        layout_populate(map, guest_slab, seen->page, 1);
}

/* The window is own and mapped. What is not in the page table yet? */
static int fill(struct pcow_map *map, uint64_t guest_slab, const struct policy_seen *seen,
                struct range range)
{
    if (!slab_is_kept(&map->slabs[guest_slab].status)) {
        populate(map, guest_slab, seen, range);
        return 0;
    }
    if (!policy_fills_window(seen, range))
        range = (struct range){seen->page, 1};
    return slab_keeper(map, guest_slab)->page_ready(map, guest_slab, range.first, range.count);
}

int resolve_store(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool alone)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint64_t copied = 0;
    struct policy_seen seen;
    struct range range;
    bool short_of, again;
    int ret;

    if (page_set_has(&slab->writable, page))
        return 0;                      /* another thread was here first */
    note_thread(&map->trappers);
    ret = back_own(map, guest_slab, page, &short_of);
    alone |= short_of;
    if (ret || page_set_has(&slab->writable, page))
        return ret;
    seen = look(map, guest_slab, page);
    range = alone ? (struct range){page, 1} : policy_window(&seen);
    /* the guest was here before: larger copies pay, now or later on */
    again = has_page_in(&slab->writable, range);
    if (!alone && range.count < seen.pages) {
        ret = resolve_all(map, guest_slab, &seen);
        if (ret != -EAGAIN)
            return ret;
    }
    ret = layout_own(map, guest_slab, range.first, range.count, &copied);
    if ((ret == -ENOSPC || ret == -EIO) && range.count > 1) {
        /*
         * Not enough for all of it, or others cannot be read; the one page may still fit, and be
         * whole.
         */
        range = (struct range){page, 1};
        ret = layout_own(map, guest_slab, page, 1, &copied);
    }
    if (ret)
        return ret;
    if (slab->faults < UINT8_MAX)
        slab->faults++;
    if (again && slab->grown < UINT8_MAX)
        slab->grown++;
    slab->run_end = (uint16_t)(range.first + range.count);
    slab->run = (uint16_t)range.count;
    seen.is_short = vmas_are_short(map);
    if (range.count == seen.pages && range.count > 1) {
        if (copied)
            __atomic_fetch_add(&map->stats.slabs_promoted, 1, __ATOMIC_RELAXED);
        /*
         * If mappings run short it has to become one, and if it has many that is cheaper; else what
         * the guest uses stays as it is.
         */
        return policy_maps_anew(&seen, slab->pieces)
                   ? layout_map_slab(map, guest_slab)
                   : layout_map_own(map, guest_slab, 0, range.count);
    }
    try_to_keep(map, guest_slab, policy_keep(&seen, range.count, copied > 0, again));
    /*
     * It was, or has become so as the kernel refused: one that is unmapped has no page that is
     * mapped for stores, nothing would protect it.
     */
    if (slab_is_unmapped(&slab->status)) {
        ret = layout_map_slab(map, guest_slab);
        if (ret || page_set_has(&slab->writable, page))
            return ret;
    }
    /*
     * What was hoped for is not to be: then as for any slab, and as there, the page alone if the
     * rest cannot be had.
     */
    if (seen.keepable && !slab_is_kept(&slab->status) && vmas_are_short(map)
        && layout_own_whole(map, guest_slab) == 0)
        return layout_map_slab(map, guest_slab);
    ret = layout_map_own(map, guest_slab, range.first, range.count);
    if (!ret)
        ret = fill(map, guest_slab, &seen, range);
    if (ret)
        return ret;
    ahead_served(map, guest_slab, copied > 0, again && slab->grown == 1);
    return 0;
}
