/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "image/prepare.h"
#include "monitor/monitor.h"
#include "util/error.h"
#include "util/order.h"

#define DEFAULT_MAX_MAP_COUNT 65530u   /* Linux, include/linux/mm.h */

static unsigned default_vma_budget(void)
{
    unsigned count = DEFAULT_MAX_MAP_COUNT;
    FILE *file = fopen("/proc/sys/vm/max_map_count", "re");

    if (file) {
        if (fscanf(file, "%u", &count) != 1)
            count = DEFAULT_MAX_MAP_COUNT;
        fclose(file);
    }
    /* The rest is for malloc and the threads of the process, which fail for good when there is none left. */
    return count / 4 * 3;
}

static int check_mappable(pcow_image *image, struct pcow_error *error)
{
    if (image_is_inherited(image))
        return image_error_inherited(image, error);
    if (image->map)
        return error_set(error, -EBUSY, "%s is mapped already", image->file.path);
    if (!chain_get(image, error))
        return -ENOMEM;
    if (image->chain->incomplete)
        return error_set(error, -ENOLINK, "%s was opened without its base and cannot be mapped", image->file.path);
    /* Whoever maps it for writing is about to change it; from the fault path it would be too late to say so. */
    return image->file.writable ? image_begin_change(image, error) : 0;
}

static int note_lost(struct pcow_map *map, struct pcow_error *error)
{
    for (struct pcow_image *image = map->image; image; image = image->base) {
        int ret = lost_add_known(&image->file);

        if (ret == -ENOSPC)
            return error_set(error, -EIO, "%s has more than %u pages in bad blocks; take a copy of it from a backup", image->file.path,
                             MAX_LOST_PAGES);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot find the bad blocks of its device", image->file.path);
        map->lost |= image->file.lost_pages.any;
    }
    return 0;
}

int pcow_map_create(pcow_image *image, const struct pcow_map_options *options, pcow_map **result, struct pcow_error *error)
{
    static const struct pcow_map_options defaults;
    struct pcow_map *map;
    int ret = check_mappable(image, error);

    *result = NULL;
    if (!ret)
        ret = signal_prepare(error);
    if (ret)
        return ret;
    if (!options)
        options = &defaults;
    map = calloc(1, sizeof *map);
    if (!map)
        return error_set(error, -ENOMEM, "out of memory");
    map->image = image;
    map->size = image->size;
    map->full_policy = options->full_policy;
    map->vma_budget = options->vma_budget ? options->vma_budget : default_vma_budget();
    map->shares_vmas = !options->vma_budget;
    map->serves_sigbus = options->serves_sigbus;
    map->engine = options->engine == PCOW_ENGINE_KVM ? &kvm_engine
                  : options->engine == PCOW_ENGINE_MINOR ? &minor_engine
                  : options->engine == PCOW_ENGINE_UFFD && image->file.writable ? &uffd_engine : &signal_engine;
    pthread_mutex_init(&map->watch_lock, NULL);
    map->uffd = map->minor.fd = -1;
    map->density.pagemap = -1;
    map->events.fd = -1;
    /* aligned_alloc: a page set is a cache line. */
    map->slabs = aligned_alloc(64, image->chain->guest_slabs * sizeof *map->slabs);
    if (!map->slabs || events_init(&map->events)) {
        ret = error_set(error, -ENOMEM, "out of memory or descriptors");
        goto fail;
    }
    memset(map->slabs, 0, image->chain->guest_slabs * sizeof *map->slabs);
    ret = reserve_range(map, error);
    if (!ret)
        ret = note_lost(map, error);
    if (!ret)
        ret = map->engine->prepare(map, error);
    if (ret)
        goto fail;
    image->map = map;
    ret = reserve_lay_out(map, error);
    /* Not before: a trap in memory that others have in a hole of the range is not ours. */
    if (!ret)
        ret = signal_register(map, error);
    if (!ret) {
        /* Before the engine: its thread looks at what these set up. */
        density_open(&map->density);
        ahead_start(map, options->prepared_slabs);
        ret = map->engine->start(map, error);
    }
    if (ret) {
        pcow_map_destroy(map);
        return ret;
    }
    order_release(map);
    *result = map;
    return 0;

fail:
    signal_end();
    reserve_release(map);
    minor_close(map);
    events_destroy(&map->events);
    free(map->slabs);
    free(map);
    return ret;
}

/* In a child: its threads are not there, and the file is the parent's. */
static void forget(struct pcow_map *map)
{
    if (map->uffd >= 0)
        close(map->uffd);
    density_close(&map->density);
    free(map->retired.moved);          /* not retire_end(): what it unmaps counts among the parent's mappings */
    reserve_release(map);
    minor_close(map);
    map->image->map = NULL;
    events_destroy(&map->events);
    free(map->slabs);
    free(map);
}

void pcow_map_destroy(pcow_map *map)
{
    if (!map)
        return;
    if (image_is_inherited(map->image)) {
        forget(map);
        return;
    }
    __atomic_store_n(&map->closing, true, __ATOMIC_RELAXED);
    order_acquire(map);
    map->engine->stop(map);
    /* It may be copying what cannot be read, for which the handlers are needed. */
    ahead_stop(map);
    /* Who waits for space may have found some: no page is taken from what he copies to, nor the ring from under him. */
    signal_leave(map);
    ahead_end(map);
    retire_end(map);
    signal_end();
    density_close(&map->density);
    reserve_release(map);
    minor_close(map);
    vmas_add(map, -(int)map->vmas);
    map->image->map = NULL;
    events_destroy(&map->events);
    free(map->slabs);
    free(map);
}

void *pcow_map_address(const pcow_map *map)
{
    return map->address;
}

int pcow_map_event_fd(const pcow_map *map)
{
    return map->events.fd;
}

static bool tell_withdrawn(pcow_map *map, struct pcow_event *event)
{
    if (!__atomic_exchange_n(&map->withdrawn, false, __ATOMIC_SEQ_CST))
        return false;
    *event = (struct pcow_event){.kind = PCOW_EVENT_WITHDRAWN};
    return true;
}

bool pcow_map_next_event(pcow_map *map, struct pcow_event *event)
{
    /* Again at the end: where there is no event, what has woken the caller is used up. */
    return tell_withdrawn(map, event) || events_next(&map->events, event) || tell_withdrawn(map, event);
}

int pcow_map_restore(pcow_map *map, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    uint64_t end = offset + length;
    int ret = 0;

    if (offset > map->size || length > map->size - offset)
        return error_set(error, -EINVAL, "%s: restore beyond its end", map->image->file.path);
    for (uint64_t v = offset >> SLAB_BITS; v << SLAB_BITS < end && !ret; v++) {
        chain_claim(map->image->chain, v);
        ret = map->image->file.writable ? layout_map_slab(map, v) : gather_slab(map, v);
        chain_release(map->image->chain, v);
    }
    return ret ? error_set_errno(error, ret, "cannot map %s", map->image->file.path) : 0;
}

void pcow_map_get_stats(const pcow_map *map, struct pcow_map_stats *stats)
{
    const struct pcow_image *image = map->image;

    *stats = (struct pcow_map_stats){
        .engine = map->engine->id,
        .write_traps = __atomic_load_n(&map->stats.write_traps, __ATOMIC_RELAXED),
        .read_traps = __atomic_load_n(&map->stats.read_traps, __ATOMIC_RELAXED),
        .pages_copied = __atomic_load_n(&map->stats.pages_copied, __ATOMIC_RELAXED),
        .pages_zeroed = __atomic_load_n(&map->stats.pages_zeroed, __ATOMIC_RELAXED),
        .slabs_promoted = __atomic_load_n(&map->stats.slabs_promoted, __ATOMIC_RELAXED),
        .pool_full_waits = __atomic_load_n(&map->stats.pool_full_waits, __ATOMIC_RELAXED),
        .flushes = __atomic_load_n(&map->stats.flushes, __ATOMIC_RELAXED),
        .watches = __atomic_load_n(&map->stats.watches, __ATOMIC_RELAXED),
        .vmas = __atomic_load_n(&map->vmas, __ATOMIC_RELAXED),
        .vma_budget = map->vma_budget,
        .slabs_ready = image->ready ? prepared_count(image) : 0,
        .slabs_prepared = __atomic_load_n(&map->ahead.prepared, __ATOMIC_RELAXED),
        .slabs_missed = image->ready ? __atomic_load_n(&image->ready->missed, __ATOMIC_RELAXED) : 0,
        .slabs_queued = ahead_queued(map),
        .slabs_completed = __atomic_load_n(&map->ahead.completed, __ATOMIC_RELAXED),
        .memory = sizeof *map + sizeof *image + ((map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS) * (sizeof *map->slabs + sizeof(slab_ref) + 1),
    };
    stats->memory += __atomic_load_n(&map->gathered, __ATOMIC_RELAXED) * PCOW_SLAB_SIZE;
    if (__atomic_load_n(&map->retired.moved, __ATOMIC_RELAXED))
        stats->memory += ((map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS) * sizeof *map->retired.moved;
    if (image->ready)
        stats->memory += sizeof *image->ready + image_slab_count(image) * sizeof *image->prepared;
    for (const struct pcow_image *file = image; file; file = file->base)
        stats->memory += image_slab_count(file) * (sizeof *file->slabs + sizeof *file->valid);
}

/* ---- for snapshot operations ------------------------------------------------------------------------------------- */

static int protect(struct pcow_map *map)
{
    uint64_t v = 0, slabs = map->image->chain->guest_slabs;

    while (v < slabs) {
        uint64_t end = v;

        while (end < slabs && map->slabs[end].cold == map->slabs[v].cold)
            end++;
        if (!map->slabs[v].cold
            && mprotect(map->address + (v << SLAB_BITS),
                        (end << SLAB_BITS < map->size ? end << SLAB_BITS : map->size) - (v << SLAB_BITS), PROT_READ))
            return -errno;
        v = end;
    }
    return 0;
}

/* Absent memory of the uffd engine must stay writable to be noticed, so only what is mapped for stores is protected, run by run. */
static int protect_writable(struct pcow_map *map)
{
    uint64_t from = 0, to = 0;

    for (uint64_t v = 0; v < map->image->chain->guest_slabs; v++) {
        const struct page_set *writable = &map->slabs[v].writable;

        for (unsigned page = 0; page < PAGES_PER_SLAB;) {
            unsigned end = page_set_run_end(writable, page, PAGES_PER_SLAB);
            uint64_t start = (v << SLAB_BITS) + page * PCOW_PAGE_SIZE;

            if (page_set_has(writable, page)) {
                if (start != to) {
                    if (to > from && mprotect(map->address + from, to - from, PROT_READ))
                        return -errno;
                    from = start;
                }
                to = start + (end - page) * PCOW_PAGE_SIZE;
            }
            page = end;
        }
    }
    return to > from && mprotect(map->address + from, to - from, PROT_READ) ? -errno : 0;
}

/*
 * Nobody stores, but somebody may load, and be about to map what was own before the layer changed. Whoever claims a slab after this look at
 * it sees the new one.
 */
static void await_claims(const struct pcow_map *map)
{
    struct chain *chain = map->image->chain;

    for (uint64_t v = 0; v < chain->guest_slabs; v++)
        if (__atomic_load_n(&chain->claim[v], __ATOMIC_SEQ_CST)) {
            chain_claim(chain, v);
            chain_release(chain, v);
        }
}

int monitor_freeze(struct pcow_map *map, struct pcow_error *error)
{
    int ret;

    /* The word that names the active layer was stored, flushed and fenced: no claim is looked at before that is seen. */
    __atomic_fetch_add(&map->freezes, 1, __ATOMIC_SEQ_CST);
    await_claims(map);
    retire_tables(map);
    /* What is mapped for stores is not known of every slab: none may stay. */
    ret = map->unknown ? -ENOMEM : map->engine->id == PCOW_ENGINE_UFFD ? protect_writable(map) : protect(map);

    if (!ret)
        ret = lost_hide_again(map);
    if (map->image->file.persist.persistence == PCOW_PERSISTENCE_PMEM)
        flush_frozen(map);

    watch_forget(map);
    ahead_froze(map);
    /* A page that stayed writable would change the snapshot. Without any mapping every access traps: slower, but right. */
    if (ret)
        return monitor_unmap_all(map, error);
    /* What has become an older layer is to be copied when it is read. */
    if (image_copies_on_read(map->image)) {
        ret = monitor_unmap_all(map, error);
        return ret ? ret : monitor_map_all(map, error);
    }
    for (uint64_t v = 0; v < map->image->chain->guest_slabs; v++) {
        memset(&map->slabs[v].writable, 0, sizeof map->slabs[v].writable);
        /* Each page that is mapped counts as if it had cut a mapping; from one snapshot to the next that would add up. */
        if (map->slabs[v].faults)
            layout_recount(map, v);
        map->slabs[v].faults = 0;
        map->slabs[v].queued = 0;
        if (map->slabs[v].minor)
            __atomic_store_n(&map->slabs[v].minor, MINOR_FROZEN, __ATOMIC_SEQ_CST);
        map->slabs[v].loaded = 0;
        map->slabs[v].grown = 0;
        map->slabs[v].run = 0;
    }
    return 0;
}

int monitor_unmap_all(struct pcow_map *map, struct pcow_error *error)
{
    uint64_t slabs = (map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;
    int ret;

    order_acquire(map);
    ret = reserve_again(map, 0, map->size);
    if (ret)
        return error_set_errno(error, ret, "%s: its memory cannot be write-protected; stop the VM now, "
                               "or what it writes changes the snapshot", map->image->file.path);
    watch_forget(map);
    flush_frozen(map);
    __atomic_store_n(&map->unknown, false, __ATOMIC_SEQ_CST);      /* one mapping in place of all needs no other to be split */
    /* Not what retire.c has: it is still there. */
    for (uint64_t v = 0; v < slabs; v++)
        vmas_add(map, -(int)map->slabs[v].pieces);
    for (uint64_t v = 0; v < slabs; v++) {
        memset(&map->slabs[v], 0, offsetof(struct slab_map, asked));
        map->slabs[v].cold = 1;
    }
    order_release(map);
    return 0;
}

int monitor_map_all(struct pcow_map *map, struct pcow_error *error)
{
    /* Half a layout would be wrong. With none at all every access traps, and what it needs is mapped then. */
    return layout_map_all(map, error) ? monitor_unmap_all(map, error) : 0;
}

int monitor_map_changed(struct pcow_map *map, const struct layout_lists *lists, struct pcow_error *error)
{
    int ret;

    if (lists && !image_copies_on_read(map->image)) {
        watch_forget(map);
        order_acquire(map);
        ret = layout_map_changed(map, lists);
        order_release(map);
        if (!ret)
            return 0;
    }
    ret = monitor_unmap_all(map, error);
    return ret ? ret : monitor_map_all(map, error);
}
