/* SPDX-License-Identifier: BSD-3-Clause */
/* What happens on a trap. Everything here is async-signal-safe. */
#include <errno.h>
#include <sys/statvfs.h>
#include <time.h>

#include "chain/index.h"
#include "chain/reclaim.h"
#include "image/prepare.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/error.h"

#define ENOUGH_SPACE (UINT64_C(64) << 20)
#define WAIT_INTERVAL_NS 10000000L     /* between two tries on a full pool */

static void count_up(uint64_t *counter, uint64_t by)
{
    __atomic_fetch_add(counter, by, __ATOMIC_RELAXED);
}

static bool has_page_in(const struct page_set *set, struct range range)
{
    unsigned end = range.first + range.count;

    return page_set_has(set, range.first) || page_set_run_end(set, range.first, end) < end;
}

static bool vmas_are_short(const struct pcow_map *map)
{
    return policy_is_short(vmas_used(map), map->vma_budget);
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
        .begun = has_page_in(&slab->writable, (struct range){first, cluster < pages - first
                                                                        ? cluster
                                                                        : pages - first}),
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
           && policy_wants_rest(seen, page_set_count(&map->slabs[guest_slab].writable))
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
                struct range range, bool copied)
{
    if (!slab_is_kept(&map->slabs[guest_slab].status)) {
        populate(map, guest_slab, seen, range);
        return 0;
    }
    range = policy_let_in(seen, range, copied);
    return slab_keeper(map, guest_slab)->page_ready(map, guest_slab, range.first, range.count);
}

/* Make the page own and map it for stores. The claim is held. */
static int resolve_write(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint64_t copied = 0;
    struct policy_seen seen;
    struct range range;
    bool alone, again;
    int ret;

    if (page_set_has(&slab->writable, page))
        return 0;                      /* another thread was here first */
    note_thread(&map->trappers);
    ret = back_own(map, guest_slab, page, &alone);
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
            count_up(&map->stats.slabs_promoted, 1);
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
        ret = fill(map, guest_slab, &seen, range, copied > 0);
    if (ret)
        return ret;
    ahead_served(map, guest_slab, copied > 0, again && slab->grown == 1);
    return 0;
}

/* A load from memory where nothing is mapped. */
static int resolve_read(struct pcow_map *map, uint64_t guest_slab)
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
    /*
     * Else another thread was here first; unless a mapping has failed, and nothing is there for
     * what is own.
     */
    return slab_is_stale(&slab->status) ? layout_map_slab(map, guest_slab) : 0;
}

/* Nothing is claimed: whoever wants the thread meanwhile may have it. */
static void pause_between_tries(signal_mask mask)
{
    struct timespec interval = {0, WAIT_INTERVAL_NS};
    signal_mask blocked = signals_change(SIG_SETMASK, mask);

    nanosleep(&interval, NULL);
    signals_change(SIG_SETMASK, blocked);
}

static int resolve_once(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool write)
{
    const struct slab_keeper *keeper = slab_keeper(map, guest_slab);
    int ret;

    index_update(map->image, guest_slab);
    ret = keeper ? keeper->serve(map, guest_slab, page, write) : KEEPER_GO_ON;
    if (ret == KEEPER_GO_ON)
        ret = write ? resolve_write(map, guest_slab, page) : resolve_read(map, guest_slab);
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
    bool told = false, reclaimed = false;
    int ret;

    for (;;) {
        bool found = false;

        gate_enter(map);
        chain_claim(map->image->chain, guest_slab);
        ret = lost_in_map(map, offset) ? -EIO : resolve_once(map, guest_slab, page, write);
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
        if (!told) {
            told = true;
            count_up(&map->stats.pool_full_waits, 1);
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
    if (told && ret == 0)
        events_post(&map->events, PCOW_EVENT_POOL_RESUMED, 0, offset);
    if (ret && ret != -ENOSPC)
        events_post(&map->events, PCOW_EVENT_ERROR, ret, offset);
    return ret;
}

/*
 * The common case, asked at every device access, and by a guest perhaps for gigabytes at once: from
 * here on so much of the slab is mapped for this. 0: this page is not.
 */
static uint64_t mapped_already(struct pcow_map *map, uint64_t offset, bool write, bool kernel)
{
    const struct slab_map *slab = &map->slabs[offset >> SLAB_BITS];
    unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB);

    if (kernel && !slab_ask(map, offset >> SLAB_BITS))
        return 0;
    if (page_set_has(&slab->writable, page))
        return (page_set_run_end(&slab->writable, page, PAGES_PER_SLAB) - page) * PCOW_PAGE_SIZE;
    return !write && slab_can_be_loaded_from(&slab->status)
               ? (PAGES_PER_SLAB - page) * PCOW_PAGE_SIZE
               : 0;
}

/*
 * Class page-cache: so little that a store to a page which has its block may fail for want of space
 * for its neighbours, see image/folio.c. Then each page is asked for, also those that are mapped
 * for stores.
 */
static bool is_short_of_space(const struct pcow_map *map, uint64_t length)
{
    struct statvfs fs;

    return map->image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE
           && fstatvfs(map->image->file.fd, &fs) == 0
           && fs.f_bavail * fs.f_frsize < ENOUGH_SPACE + length / PCOW_PAGE_SIZE * PCOW_SLAB_SIZE;
}

static int prepare(pcow_map *map, uint64_t offset, uint64_t length, bool write, bool kernel,
                   struct pcow_error *error)
{
    uint64_t end = offset + length, mapped;
    bool is_short = write && is_short_of_space(map, length);
    struct interrupts interrupts;

    if (offset > map->size || length > map->size - offset)
        return error_set(error, -EINVAL, "%s: offset %llu and length %llu reach beyond its end",
                         map->image->file.path, (unsigned long long)offset,
                         (unsigned long long)length);
    for (offset &= ~(PCOW_PAGE_SIZE - 1); offset < end;
         offset += mapped ? mapped : PCOW_PAGE_SIZE) {
        int ret;

        mapped = is_short ? 0 : mapped_already(map, offset, write, kernel);
        if (mapped)
            continue;
        count_up(&map->asked, 1);
        interrupts = interrupts_disable();
        ret = resolve(map, offset, write, NULL);
        interrupts_restore(interrupts);
        if (ret == -ENOSPC)
            return error_set(error, ret, "%s: the pool is full; free space or extend it",
                             map->image->file.path);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot prepare offset %llu",
                                   map->image->file.path, (unsigned long long)offset);
    }
    return 0;
}

int pcow_map_resolve(pcow_map *map, uint64_t offset, uint64_t length, bool write,
                     struct pcow_error *error)
{
    return prepare(map, offset, length, write, true, error);
}

int pcow_map_prepare(pcow_map *map, uint64_t offset, uint64_t length, bool write,
                     struct pcow_error *error)
{
    return prepare(map, offset, length, write, false, error);
}

int pcow_map_trap(pcow_map *map, uint64_t offset, bool write)
{
    struct interrupts interrupts;
    int ret;

    if (offset >= map->size)
        return -EFAULT;
    count_up(&map->asked, 1);
    interrupts = interrupts_disable();
    ret = resolve(map, offset & ~(PCOW_PAGE_SIZE - 1), write, NULL);
    interrupts_restore(interrupts);
    return ret;
}

void pcow_map_settle(pcow_map *map, uint64_t offset, uint64_t length)
{
    if (offset >= map->size || length == 0)
        return;
    if (length > map->size - offset)
        length = map->size - offset;
    flush_await_mapped(map, offset, offset + length);
}
