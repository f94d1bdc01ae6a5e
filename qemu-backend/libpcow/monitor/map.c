/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "chain/index.h"
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
    /*
     * The rest is for malloc and the threads of the process, which fail for good when there is none
     * left.
     */
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
        return error_set(error, -ENOLINK, "%s was opened without its base and cannot be mapped",
                         image->file.path);
    /*
     * Whoever maps it for writing is about to change it; from the fault path it would be too late
     * to say so.
     */
    return image->file.writable ? image_begin_change(image, error) : 0;
}

static int note_lost(struct pcow_map *map, struct pcow_error *error)
{
    for (struct pcow_image *image = map->image; image; image = image->base) {
        int ret = lost_add_known(&image->file);

        if (ret == -ENOSPC)
            return error_set(
                error, -EIO,
                "%s has more than %u pages in bad blocks; take a copy of it from a backup",
                image->file.path, MAX_LOST_PAGES);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot find the bad blocks of its device",
                                   image->file.path);
        map->lost |= image->file.lost_pages.any;
    }
    return 0;
}

static size_t slabs_size(const struct pcow_map *map)
{
    return ((map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS) * sizeof *map->slabs + PCOW_PAGE_SIZE;
}

/* Memory that is not touched takes none. */
static struct slab_map *make_slabs(const struct pcow_map *map)
{
    void *slabs = mmap(NULL, slabs_size(map), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return slabs == MAP_FAILED ? NULL : slabs;
}

static void free_slabs(struct pcow_map *map)
{
    if (map->slabs)
        munmap(map->slabs, slabs_size(map));
}

int pcow_map_create(pcow_image *image, const struct pcow_map_options *options, pcow_map **result,
                    struct pcow_error *error)
{
    static const struct pcow_map_options defaults;
    struct pcow_map *map;
    int ret = check_mappable(image, error);

    *result = NULL;
    if (!options)
        options = &defaults;
    if (!ret && !engine_find(options->engine))
        ret = error_set(error, -EINVAL,
                        "there is no engine %d; the engines are signal, kvm and minor",
                        (int)options->engine);
    if (!ret)
        ret = dispatch_prepare(error);
    if (ret)
        return ret;
    map = calloc(1, sizeof *map);
    if (!map)
        return error_set(error, -ENOMEM, "out of memory");
    map->image = image;
    map->size = image->size;
    map->full_policy = options->full_policy;
    map->vma_budget = options->vma_budget ? options->vma_budget : default_vma_budget();
    map->shares_vmas = !options->vma_budget;
    map->serves_sigbus = options->serves_sigbus;
    map->engine = engine_find(options->engine);
    pthread_mutex_init(&map->watch_lock, NULL);
    map->uffd = -1;
    map->density.pagemap = -1;
    map->events.fd = -1;
    map->slabs = make_slabs(map);
    if (!map->slabs || events_init(&map->events)) {
        ret = error_set(error, -ENOMEM, "out of memory or descriptors");
        goto fail;
    }
    ret = reserve_range(map, error);
    if (!ret)
        ret = note_lost(map, error);
    if (ret)
        goto fail;
    if (!map->engine->prepare(map))
        map->engine = engine_find(PCOW_ENGINE_SIGNAL);
    image->map = map;
    ret = layout_begin(map, error);
    /* Not before: a trap in memory that others have in a hole of the range is not ours. */
    if (!ret)
        ret = dispatch_register(map, error);
    if (ret) {
        pcow_map_destroy(map);
        return ret;
    }
    density_open(&map->density);
    ahead_start(map, options->prepared_slabs);
    *result = map;
    return 0;

fail:
    dispatch_end();
    reserve_release(map);
    map->engine->close(map);
    events_destroy(&map->events);
    free_slabs(map);
    free(map);
    return ret;
}

/* In a child: its threads are not there, and the file is the parent's. */
static void forget(struct pcow_map *map)
{
    if (map->uffd >= 0)
        close(map->uffd);
    density_close(&map->density);
    /* not retire_end(): what it unmaps counts among the parent's mappings */
    free(map->retired.moved);
    reserve_release(map);
    map->engine->close(map);
    map->image->map = NULL;
    events_destroy(&map->events);
    free_slabs(map);
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
    uffd_close(map);
    /* It may be copying what cannot be read, for which the handlers are needed. */
    ahead_stop(map);
    /*
     * Who waits for space may have found some: no page is taken from what he copies to, nor the
     * ring from under him.
     */
    dispatch_leave(map);
    ahead_end(map);
    retire_end(map);
    dispatch_end();
    density_close(&map->density);
    reserve_release(map);
    map->engine->close(map);
    vmas_add(map, -(int)map->vmas);
    map->image->map = NULL;
    events_destroy(&map->events);
    free_slabs(map);
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
    return tell_withdrawn(map, event) || events_next(&map->events, event)
           || tell_withdrawn(map, event);
}

int pcow_map_restore(pcow_map *map, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    uint64_t end = offset + length;
    int ret = 0;

    if (offset > map->size || length > map->size - offset)
        return error_set(error, -EINVAL, "%s: restore beyond its end", map->image->file.path);
    for (uint64_t v = offset >> SLAB_BITS; v << SLAB_BITS < end && !ret; v++) {
        struct interrupts interrupts = interrupts_disable();

        gate_enter(map);
        chain_claim(map->image->chain, v);
        ret = map->image->file.writable ? layout_map_slab(map, v) : bounce_slab(map, v);
        chain_release(map->image->chain, v);
        gate_leave(map);
        interrupts_restore(interrupts);
    }
    return ret ? error_set_errno(error, ret, "cannot map %s", map->image->file.path) : 0;
}

void pcow_map_get_stats(const pcow_map *map, struct pcow_map_stats *stats)
{
    const struct pcow_image *image = map->image;

    *stats = (struct pcow_map_stats){
        .engine = map->engine->number,
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
        .memory = sizeof *map + sizeof *image
                  + __atomic_load_n(&map->slabs_counted, __ATOMIC_RELAXED)
                        * (sizeof *map->slabs + sizeof(slab_ref) + 1),
    };
    stats->memory += index_memory(__atomic_load_n(&image->chain, __ATOMIC_ACQUIRE));
    stats->memory += __atomic_load_n(&map->bounced, __ATOMIC_RELAXED) * PCOW_SLAB_SIZE;
    stats->memory +=
        __atomic_load_n(&map->retired.room, __ATOMIC_RELAXED) * sizeof *map->retired.moved;
    if (image->ready)
        stats->memory += sizeof *image->ready + image_slab_count(image) * sizeof *image->prepared;
    for (const struct pcow_image *file = image; file; file = file->base)
        stats->memory += image_slab_count(file) * (sizeof *file->slabs + sizeof *file->valid);
}

/* ---- for snapshot operations ----------------------------------------------------------------- */

/* A stretch of slabs that are used and mapped; between them may be others that are absent. */
static int protect_slabs(struct pcow_map *map, uint64_t first, uint64_t end)
{
    uint64_t from = first << SLAB_BITS,
             to = end << SLAB_BITS < map->size ? end << SLAB_BITS : map->size;

    return mprotect(map->address + from, to - from, PROT_READ) ? -errno : 0;
}

static int protect(struct pcow_map *map)
{
    const struct chain *chain = map->image->chain;
    uint64_t v = chain_next_used(chain, 0);
    int ret = 0;

    while (v < chain->guest_slabs && !ret) {
        uint64_t first = v, end = v;

        /*
         * What is not used is read-only, and protecting it once more costs nothing where it lies
         * between.
         */
        while (v < chain->guest_slabs && !slab_is_unmapped(&map->slabs[v].status)) {
            end = v + 1;
            v = chain_next_used(chain, end);
        }
        if (end > first)
            ret = protect_slabs(map, first, end);
        else
            v = chain_next_used(chain, v + 1);
    }
    return ret;
}

int monitor_freeze(struct pcow_map *map, struct pcow_error *error)
{
    int ret;

    retire_tables(map);
    /* What is mapped for stores is not known of every slab: none may stay. */
    ret = map->unknown ? -ENOMEM : protect(map);

    if (!ret)
        ret = lost_hide_again(map);
    /* They leave the sets below, and may hold stores that no flush has covered. */
    image_note_stores(map->image);

    watch_forget(map);
    ahead_froze(map);
    /*
     * A page that stayed writable would change the snapshot. Without any mapping every access
     * traps: slower, but right.
     */
    if (ret)
        return monitor_unmap_all(map, error);
    for (uint64_t v = chain_next_used(map->image->chain, 0); v < map->image->chain->guest_slabs;
         v = chain_next_used(map->image->chain, v + 1)) {
        memset(&map->slabs[v].writable, 0, sizeof map->slabs[v].writable);
        /*
         * Each page that is mapped counts as if it had cut a mapping; from one snapshot to the next
         * that would add up.
         */
        if (map->slabs[v].faults)
            layout_recount(map, v);
        map->slabs[v].faults = 0;
        map->slabs[v].queued = 0;
        if (slab_is_kept(&map->slabs[v].status))
            slab_keeper(map, v)->freeze(map, v);
        slab_freeze_stale(&map->slabs[v].status);
        map->slabs[v].loaded = 0;
        map->slabs[v].grown = 0;
        map->slabs[v].run = 0;
        /*
         * What has become an older layer is to be copied when it is read. If it cannot be unmapped,
         * it is read where it is.
         */
        if (!slab_is_unmapped(&map->slabs[v].status) && layout_is_to_be_copied(map, v))
            layout_unmap_slab(map, v);
    }
    return 0;
}

/*
 * At the kernel's limit of mappings none can be put in the place of all. But all of them can be
 * made inaccessible as they are, which splits none: every access traps, and is mapped then.
 */
static int make_inaccessible(const struct pcow_map *map)
{
    return mprotect(map->address, map->size, PROT_NONE) ? -errno : 0;
}

int monitor_unmap_all(struct pcow_map *map, struct pcow_error *error)
{
    uint64_t slabs = (map->size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS;
    bool still_mapped = false;
    int ret;

    order_acquire(map);
    ret = reserve_again(map, 0, map->size);
    if (ret && make_inaccessible(map) == 0) {
        still_mapped = true;
        ret = 0;
    }
    if (ret)
        return error_set_errno(error, ret,
                               "%s: its memory cannot be write-protected; stop the VM now, "
                               "or what it writes changes the snapshot",
                               map->image->file.path);
    watch_forget(map);
    image_note_stores(map->image);
    /* one mapping in place of all needs no other to be split */
    __atomic_store_n(&map->unknown, false, __ATOMIC_SEQ_CST);
    /* Not what retire.c has: it is still there. */
    for (uint64_t v = 0; v < slabs && !still_mapped; v++)
        vmas_add(map, -(int)map->slabs[v].pieces);
    for (uint64_t v = 0; v < slabs; v++) {
        uint16_t pieces = still_mapped ? map->slabs[v].pieces : 0;

        memset(&map->slabs[v], 0, offsetof(struct slab_map, status));
        map->slabs[v].pieces = pieces;
        slab_refresh(&map->slabs[v].status);
        layout_enter(map, v, SLAB_UNMAPPED);
        if (map->image->chain)
            sparse_set_add(&map->image->chain->used, v);
    }
    order_release(map);
    return 0;
}

int monitor_map_all(struct pcow_map *map, struct pcow_error *error)
{
    /*
     * Half a layout would be wrong. With none at all every access traps, and what it needs is
     * mapped then.
     */
    return layout_map_all(map, error) ? monitor_unmap_all(map, error) : 0;
}

int monitor_map_changed(struct pcow_map *map, const struct layout_lists *lists,
                        struct pcow_error *error)
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
