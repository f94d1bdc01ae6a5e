/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Page tables that a snapshot or a revert has no more use for. Changing or emptying them entry by entry takes the kernel 40 to 120 ns a
 * page, for which the VM would stand still. mremap() with MREMAP_DONTUNMAP (Linux 5.13, shared mappings of files) moves whole tables to
 * another address, an entry for 2 MiB or even 1 GiB of them, and leaves the mapping where it was, with nothing filled in. What was moved is
 * unmapped by the thread that works ahead, a slab at a time.
 *
 * It is only about time: what the moved tables show is the same memory of the same file, at addresses that nobody knows, and whatever is not
 * moved is protected or replaced where it is.
 */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define ALIGNMENT (UINT64_C(1) << 30)  /* of both addresses to each other: the kernel can move the tables of 1 GiB at once */
#define ALWAYS 8u                      /* slabs in one mapping, for which a look at the tables is not worth it */
#define AT_ONCE 8u                     /* slabs that are unmapped, one after the other, before other work has its turn */
#define PAGEMAP_PRESENT (UINT64_C(1) << 63)

/* Guest slabs that one mapping serves. */
struct run {
    uint64_t first, end;
    uint64_t offset;                   /* in the file, of the first */
};

/* Mapped for stores from end to end. The layer that owns it may not be the active one any more; the chain is as it was mapped. */
static bool is_whole(const struct pcow_map *map, uint64_t guest_slab, uint64_t *offset)
{
    struct place place;

    if (!page_set_full(&map->slabs[guest_slab].writable))
        return false;
    place = chain_find(map->image, guest_slab, 0, PAGES_PER_SLAB);
    *offset = place.offset;
    return place.present && place.pages == PAGES_PER_SLAB;
}

static struct run find_run(const struct pcow_map *map, uint64_t from)
{
    uint64_t slabs = map->image->chain->guest_slabs, offset;
    struct run run = {from, from, 0};

    while (run.first < slabs && !is_whole(map, run.first, &run.offset))
        run.first++;
    run.end = run.first < slabs ? run.first + 1 : slabs;
    while (run.end < slabs && is_whole(map, run.end, &offset) && offset == run.offset + ((run.end - run.first) << SLAB_BITS))
        run.end++;
    return run;
}

/* Of a slab that the guest does not use there is nothing to move, and finding that out is cheaper. One page tells of a slab. */
static bool is_used(const struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t page = guest_slab * 167 % PAGES_PER_SLAB, entry;
    uintptr_t address = (uintptr_t)map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;

    return pread(map->density.pagemap, &entry, sizeof entry, (off_t)(address / PCOW_PAGE_SIZE * sizeof entry)) != sizeof entry
        || entry & PAGEMAP_PRESENT;
}

static bool move(const struct pcow_map *map, uint64_t first, uint64_t end)
{
    size_t length = (end - first) << SLAB_BITS;

    return mremap(map->address + (first << SLAB_BITS), length, length, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP,
                  map->retired.address + (first << SLAB_BITS)) != MAP_FAILED;
}

/* Returns how many mappings more there are. Neighbours that look like one mapping may be two: then one slab after the other. */
static unsigned move_run(const struct pcow_map *map, const struct run *run)
{
    unsigned moved = 0;

    if (run->end - run->first < ALWAYS && !is_used(map, run->first))
        return 0;
    if (move(map, run->first, run->end))
        return 1;
    for (uint64_t v = run->first; v < run->end && run->end - run->first > 1; v++)
        moved += move(map, v, v + 1);
    return moved;
}

/* mlock(): the mapping that stays behind would not be locked any more. */
static bool is_locked(const struct pcow_map *map)
{
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];

    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmLck: %llu", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib >= map->size >> 10;
}

static bool reserve(struct pcow_map *map)
{
    struct retired *retired = &map->retired;

    retired->reservation_size = map->size + ALIGNMENT;
    retired->reservation = mmap(NULL, retired->reservation_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (retired->reservation == MAP_FAILED)
        return false;
    retired->address = retired->reservation + (((uintptr_t)map->address - (uintptr_t)retired->reservation) & (ALIGNMENT - 1));
    return true;
}

void retire_tables(struct pcow_map *map)
{
    struct retired *retired = &map->retired;
    unsigned vmas = 1;                 /* the reservation */

    /*
     * In class pmem most entries are of 2 MiB, which are soon changed. A second time before the first is through: in the usual way, as
     * then not much was touched since.
     */
    if (!map->ahead.running || map->image->file.persist.persistence == PCOW_PERSISTENCE_PMEM
        || retire_is_due(map) || is_locked(map) || !reserve(map))
        return;
    for (struct run run = find_run(map, 0); run.first < run.end; run = find_run(map, run.end)) {
        /* Each slab may become a mapping of its own there, and cuts the reservation. */
        if (vmas_used(map) + vmas + 2 * (run.end - run.first) + 2 > map->vma_budget)
            break;
        vmas += 2 * move_run(map, &run);
    }
    retired->vmas = vmas;
    vmas_add(map, (int)vmas);
    retired->done = 0;
    __atomic_store_n(&retired->due, true, __ATOMIC_RELEASE);
}

bool retire_is_due(const struct pcow_map *map)
{
    return __atomic_load_n(&map->retired.due, __ATOMIC_ACQUIRE);
}

static void finish(struct pcow_map *map)
{
    struct retired *retired = &map->retired;

    munmap(retired->reservation, retired->reservation_size);
    vmas_add(map, -(int)retired->vmas);
    __atomic_store_n(&retired->due, false, __ATOMIC_RELEASE);
}

bool retire_some(struct pcow_map *map)
{
    struct retired *retired = &map->retired;

    if (!retire_is_due(map))
        return false;
    for (unsigned slab = 0; slab < AT_ONCE && retired->done < map->size; slab++) {
        size_t left = map->size - retired->done, length = left < PCOW_SLAB_SIZE ? left : PCOW_SLAB_SIZE;

        /* Others' mmap() waits for each. What cannot be unmapped on its own goes with the rest. */
        munmap(retired->address + retired->done, length);
        retired->done += length;
    }
    if (retired->done < map->size)
        return true;
    finish(map);
    return false;
}

void retire_end(struct pcow_map *map)
{
    if (retire_is_due(map))
        finish(map);
}
