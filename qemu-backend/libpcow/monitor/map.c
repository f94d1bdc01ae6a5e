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
#include "image/spare.h"
#include "monitor/monitor.h"
#include "util/error.h"
#include "util/order.h"
#include "util/sized.h"

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

static int create_map(pcow_image *image, const struct pcow_map_options *options, pcow_map **result,
                      struct pcow_error *error)
{
    struct pcow_map *map;
    int ret = check_mappable(image, error);

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

int pcow_map_create_sized(pcow_image *image, const struct pcow_map_options *given, size_t size,
                          pcow_map **map, struct pcow_error *error)
{
    struct pcow_map_options options = {0};
    int ret = given ? sized_take(&options, sizeof options, given, size, error) : 0;

    *map = NULL;
    return ret ? ret : create_map(image, &options, map, error);
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

int pcow_map_keep_spare(pcow_map *map, bool keep, uint64_t state_size, struct pcow_error *error)
{
    uint64_t slabs = (state_size >> SLAB_BITS) + (state_size % PCOW_SLAB_SIZE > 0);
    int ret = image_check_writable(map->image, error);

    if (ret)
        return ret;
    if (!map->ahead.running)
        return error_set(error, -EAGAIN, "%s: there is no thread that would keep space for a "
                         "snapshot", map->image->file.path);
    if (!keep)
        spare_give_up(map->image);
    else if (spare_keep(map->image, slabs < SPARE_MAX ? (unsigned)slabs : SPARE_MAX))
        return error_set(error, -ENOMEM, "out of memory");
    if (spare_is_due(map->image))
        ahead_wake(map);
    return 0;
}

void pcow_map_use_spare(pcow_map *map, bool use)
{
    spare_use(map->image, use);
    if (spare_is_due(map->image))
        ahead_wake(map);
}

bool pcow_map_lend_spare(pcow_map *map)
{
    bool lent = spare_lend(map->image);

    if (lent)
        ahead_wake(map);
    return lent;
}

void pcow_map_get_stats_sized(const pcow_map *map, struct pcow_map_stats *given, size_t size)
{
    const struct pcow_image *image = map->image;
    struct pcow_map_stats stats = {
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
        .slabs_spare = spare_count(image),
        .slabs_spare_wanted = spare_wanted(image),
        .stores_waiting = __atomic_load_n(&map->stats.stores_waiting, __ATOMIC_SEQ_CST),
        .slabs_completed = __atomic_load_n(&map->ahead.completed, __ATOMIC_RELAXED),
        .memory = sizeof *map + sizeof *image
                  + __atomic_load_n(&map->slabs_counted, __ATOMIC_RELAXED)
                        * (sizeof *map->slabs + sizeof(slab_ref) + 1),
    };
    stats.memory += index_memory(__atomic_load_n(&image->chain, __ATOMIC_ACQUIRE));
    stats.memory += __atomic_load_n(&map->bounced, __ATOMIC_RELAXED) * PCOW_SLAB_SIZE;
    stats.memory +=
        __atomic_load_n(&map->retired.room, __ATOMIC_RELAXED) * sizeof *map->retired.moved;
    if (image->ready)
        stats.memory += sizeof *image->ready + image_slab_count(image) * sizeof *image->prepared;
    for (const struct pcow_image *file = image; file; file = file->base)
        stats.memory += image_slab_count(file) * (sizeof *file->slabs + sizeof *file->valid);
    sized_give(given, size, &stats, sizeof stats);
}
