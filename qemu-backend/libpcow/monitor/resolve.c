/* SPDX-License-Identifier: BSD-3-Clause */
/* What happens on a trap. Everything here is async-signal-safe. */
#include <errno.h>
#include <time.h>

#include "monitor/monitor.h"
#include "util/error.h"

#define WAIT_INTERVAL_NS 10000000L     /* between two tries on a full pool */

struct range {
    unsigned first, count;             /* pages of the slab */
};

static void count_up(uint64_t *counter, uint64_t by)
{
    __atomic_fetch_add(counter, by, __ATOMIC_RELAXED);
}

static unsigned pages_of(const struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t left = (map->size - (guest_slab << SLAB_BITS)) / PCOW_PAGE_SIZE;

    return left < PAGES_PER_SLAB ? (unsigned)left : PAGES_PER_SLAB;
}

/*
 * How much to bring in around a page. Absent memory: its cluster. Memory that has to be copied: the page alone at the first trap in
 * the slab (fine-grained copy-on-write), its cluster when the slab proves hot. The whole slab if mappings run short.
 */
static struct range choose(const struct pcow_map *map, uint64_t guest_slab, unsigned page, bool present)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    unsigned pages = pages_of(map, guest_slab);
    unsigned cluster = 1u << (map->image->header.cluster_bits - 12);
    struct range range = {page / cluster * cluster, cluster};

    if (slab->cold || __atomic_load_n(&map->vmas, __ATOMIC_RELAXED) + 2 >= map->vma_budget)
        return (struct range){0, pages};
    if (present && slab->faults == 0)
        range = (struct range){page, 1};
    if (range.first + range.count > pages)
        range.count = pages - range.first;
    return range;
}

/* Make the page own and map it for stores. The claim is held. */
static int resolve_write(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint64_t copied = 0, zeroed = 0;
    struct place place;
    struct range range;
    int ret;

    if (page_set_has(&slab->writable, page))
        return 0;                      /* another thread was here first */
    place = chain_find(map->image, guest_slab, page, 1);
    range = choose(map, guest_slab, page, place.present);
    ret = chain_own(map->image, guest_slab, range.first, range.count, NULL, &copied, &zeroed);
    if (ret == -ENOSPC && range.count > 1) {
        /* Not enough for all of it; the one page may still fit. */
        range = (struct range){page, 1};
        ret = chain_own(map->image, guest_slab, page, 1, NULL, &copied, &zeroed);
    }
    count_up(&map->stats.pages_copied, copied);
    count_up(&map->stats.pages_zeroed, zeroed);
    if (ret)
        return ret;
    if (slab->faults < UINT8_MAX)
        slab->faults++;
    if (range.count == pages_of(map, guest_slab) && range.count > 1) {
        if (copied)
            count_up(&map->stats.slabs_promoted, 1);
        return layout_map_slab(map, guest_slab);
    }
    if (slab->cold)
        return layout_map_slab(map, guest_slab);
    return layout_map_own(map, guest_slab, range.first, range.count);
}

/* A load from memory where nothing is mapped: a cold slab, or absent memory under userfaultfd. */
static int resolve_read(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    struct place place = chain_find(map->image, guest_slab, page, 1);

    if (slab->cold)
        return map->image->file.writable ? resolve_write(map, guest_slab, page) : layout_map_slab(map, guest_slab);
    if (!place.present && map->engine->id == PCOW_ENGINE_UFFD)
        return resolve_write(map, guest_slab, page);
    return 0;
}

static void pause_between_tries(void)
{
    struct timespec interval = {0, WAIT_INTERVAL_NS};

    nanosleep(&interval, NULL);
}

int resolve(struct pcow_map *map, uint64_t offset, bool write, bool wait)
{
    uint64_t guest_slab = offset >> SLAB_BITS;
    unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB);
    bool told = false;
    int ret;

    for (;;) {
        chain_claim(map->image->chain, guest_slab);
        ret = write ? resolve_write(map, guest_slab, page) : resolve_read(map, guest_slab, page);
        chain_release(map->image->chain, guest_slab);
        if (ret != -ENOSPC || !wait)
            break;
        if (!told) {
            told = true;
            count_up(&map->stats.pool_full_waits, 1);
            events_post(&map->events, PCOW_EVENT_POOL_FULL, ret, offset);
        }
        if (map->full_policy == PCOW_FULL_FAIL || __atomic_load_n(&map->closing, __ATOMIC_RELAXED))
            break;
        /* The claim is free meanwhile: other pages of this slab that are there already can be mapped. */
        pause_between_tries();
    }
    if (told && ret == 0)
        events_post(&map->events, PCOW_EVENT_POOL_RESUMED, 0, offset);
    if (ret && ret != -ENOSPC)
        events_post(&map->events, PCOW_EVENT_ERROR, ret, offset);
    return ret;
}

int pcow_map_resolve(pcow_map *map, uint64_t offset, uint64_t length, bool write, struct pcow_error *error)
{
    uint64_t end = offset + length;

    if (offset > map->size || length > map->size - offset)
        return error_set(error, -EINVAL, "%s: offset %llu and length %llu reach beyond its end", map->image->file.path,
                         (unsigned long long)offset, (unsigned long long)length);
    for (offset &= ~(PCOW_PAGE_SIZE - 1); offset < end; offset += PCOW_PAGE_SIZE) {
        const struct slab_map *slab = &map->slabs[offset >> SLAB_BITS];
        int ret;

        /* The common case, asked at every device access: it is mapped for this. */
        if (write ? page_set_has(&slab->writable, (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB)) : !slab->cold)
            continue;
        ret = resolve(map, offset, write, false);
        if (ret == -ENOSPC)
            return error_set(error, ret, "%s: the pool is full; free space or extend it", map->image->file.path);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot prepare offset %llu", map->image->file.path, (unsigned long long)offset);
    }
    return 0;
}
