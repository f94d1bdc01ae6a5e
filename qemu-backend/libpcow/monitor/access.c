/* SPDX-License-Identifier: BSD-3-Clause */
/* What programs ask for before they access the range themselves, or have the kernel access it. */
#include <errno.h>
#include <sys/statvfs.h>

#include "monitor/monitor.h"
#include "util/error.h"

#define ENOUGH_SPACE (UINT64_C(64) << 20)

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

/*
 * On tmpfs a load from a hole takes a block. With so little space it is seen to before, as a system
 * call that loads would fail, and who made it may not make it again.
 */
static bool may_lack_space_for_holes(const struct pcow_map *map, uint64_t length)
{
    struct statvfs fs;

    return map->image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE
           && fstatvfs(map->image->file.fd, &fs) == 0
           /* 0: it has no limit */
           && fs.f_blocks > 0 && fs.f_bavail * fs.f_frsize < ENOUGH_SPACE + length;
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
        __atomic_fetch_add(&map->asked, 1, __ATOMIC_RELAXED);
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
    int ret = prepare(map, offset, length, write, true, error);

    /* What cannot be loaded all the same is no hole, and for the kernel to tell. */
    if (!ret && !write && length && may_lack_space_for_holes(map, length))
        pcow_map_show_holes(map, offset, length);
    return ret;
}

int pcow_map_prepare(pcow_map *map, uint64_t offset, uint64_t length, bool write,
                     struct pcow_error *error)
{
    return prepare(map, offset, length, write, false, error);
}

bool pcow_map_can_store(const pcow_map *map, uint64_t offset)
{
    return offset < map->size && !is_short_of_space(map, 1)
           && page_set_has(&map->slabs[offset >> SLAB_BITS].writable,
                           (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB));
}

int pcow_map_trap(pcow_map *map, uint64_t offset, bool write)
{
    struct interrupts interrupts;
    int ret;

    if (offset >= map->size)
        return -EFAULT;
    __atomic_fetch_add(&map->asked, 1, __ATOMIC_RELAXED);
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
