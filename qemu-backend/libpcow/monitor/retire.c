/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Page tables that a snapshot or a revert has no more use for. Changing or emptying them entry by
 * entry takes the kernel 40 to 120 ns a page, for which the VM would stand still. mremap() with
 * MREMAP_DONTUNMAP (Linux 5.13, shared mappings of files) moves whole tables to another address, an
 * entry for 2 MiB or even 1 GiB of them, and leaves the mapping where it was, with nothing filled
 * in. What was moved is unmapped by the thread that works ahead, a slab at a time.
 *
 * It is only about time: what the moved tables show is the same memory of the same file, at
 * addresses that nobody knows, and whatever is not moved is protected or replaced where it is. The
 * kernel chooses the addresses (no MREMAP_FIXED): nothing of others can be in the way, and a move
 * that fails changes nothing. It is told where one would be good.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "monitor/monitor.h"

/* Of both addresses to each other: the kernel can move the tables of 1 GiB at once. */
#define ALIGNMENT (UINT64_C(1) << 30)
/* Slabs in one mapping, for which a look at the tables is not worth it. */
#define ALWAYS 8u
/* So many slabs in a row that one entry maps each: then one in SAMPLE is looked at. */
#define ROW_OF_HUGE 16u
#define SAMPLE 8u
/* Slabs that are unmapped, one after the other, before other work has its turn. */
#define AT_ONCE 8u

/* Guest slabs that one mapping serves. */
struct run {
    uint64_t first, end;
    uint64_t offset;                   /* in the file, of the first */
};

/*
 * Mapped for stores from end to end. The layer that owns it may not be the active one any more; the
 * chain is as it was mapped.
 */
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

    for (run.first = chain_next_used(map->image->chain, from);
         run.first < slabs && !is_whole(map, run.first, &run.offset);)
        run.first = chain_next_used(map->image->chain, run.first + 1);
    run.end = run.first < slabs ? run.first + 1 : slabs;
    while (run.end < slabs && ((uintptr_t)map->address + (run.end << SLAB_BITS)) % ALIGNMENT
           && is_whole(map, run.end, &offset)
           && offset == run.offset + ((run.end - run.first) << SLAB_BITS))
        run.end++;
    return run;
}

/*
 * One entry of 2 MiB is changed where it is in 0.4 us, and moved in 6 to 20. Whether there is one
 * only the kernel knows, and to ask takes as long; so where all were it is asked now and then.
 */
static bool is_huge(const struct pcow_map *map, uint64_t guest_slab, unsigned *row)
{
    if (!map->image->file.huge || (*row >= ROW_OF_HUGE && guest_slab % SAMPLE))
        return map->image->file.huge;
    *row = density_is_huge(&map->density, map->address + (guest_slab << SLAB_BITS)) ? *row + 1 : 0;
    return *row > 0;
}

/*
 * Of a slab that the guest does not use there is nothing to move, and finding that out is cheaper.
 * One page tells of a slab.
 */
static bool is_worth_it(const struct pcow_map *map, uint64_t guest_slab, unsigned *row)
{
    uint64_t page = guest_slab * 167 % PAGES_PER_SLAB;

    return !is_huge(map, guest_slab, row)
           && density_present(&map->density,
                              map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE, 1)
                  != 0;
}

static bool move(struct pcow_map *map, uint8_t *good, uint64_t first, uint64_t end)
{
    struct retired *retired = &map->retired;
    size_t length = (end - first) << SLAB_BITS;
    uint8_t *address = retired->count == retired->room
                           ? MAP_FAILED
                           : mremap(map->address + (first << SLAB_BITS), length, length,
                                    MREMAP_MAYMOVE | MREMAP_DONTUNMAP, good + (first << SLAB_BITS));

    if (address == MAP_FAILED)
        return false;
    retired->moved[retired->count++] = (struct moved){address, length};
    return true;
}

/* Neighbours that look like one mapping may be two: then one slab after the other. */
static void move_run(struct pcow_map *map, uint8_t *good, const struct run *run, unsigned *row)
{
    if (run->end - run->first < ALWAYS && !is_worth_it(map, run->first, row))
        return;
    if (move(map, good, run->first, run->end))
        return;
    for (uint64_t v = run->first; v < run->end && run->end - run->first > 1; v++)
        move(map, good, v, v + 1);
}

/* mlock(): the mapping that stays behind would not be locked any more. */
bool retire_is_locked(const struct pcow_map *map)
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

/*
 * The last one came to an address to which the kernel moves entry by entry: somebody else was at
 * the good one. Slower than leaving it.
 */
static bool is_slow(const struct pcow_map *map)
{
    const struct retired *retired = &map->retired;

    return retired->count > 0
           && ((uintptr_t)retired->moved[retired->count - 1].address - (uintptr_t)map->address)
                  % PCOW_SLAB_SIZE;
}

/* Where there was room a moment ago, for all of the range, aligned as the map is. NULL: nowhere. */
static uint8_t *find_good_address(const struct pcow_map *map)
{
    size_t length = map->size + ALIGNMENT;
    uint8_t *found =
        mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (found == MAP_FAILED)
        return NULL;
    munmap(found, length);
    return found + (((uintptr_t)map->address - (uintptr_t)found) & (ALIGNMENT - 1));
}

/* For all that can be whole. The thread has done with what was there. */
static void make_room(struct pcow_map *map)
{
    struct retired *retired = &map->retired;
    size_t slabs = __atomic_load_n(&map->slabs_counted, __ATOMIC_RELAXED);

    if (slabs <= retired->room)
        return;
    free(retired->moved);
    retired->moved = malloc(slabs * sizeof *retired->moved);
    __atomic_store_n(&retired->room, retired->moved ? slabs : 0, __ATOMIC_RELAXED);
}

void retire_tables(struct pcow_map *map)
{
    struct retired *retired = &map->retired;
    unsigned row = 0;
    uint8_t *good;

    /*
     * In class pmem most entries are of 2 MiB, which are soon changed. In class page-cache what is
     * known of a lost page hangs on the address at which the kernel tells of it. A second time
     * before the first is through: in the usual way, as then not much was touched since.
     */
    if (!map->ahead.running || map->image->file.persist.persistence != PCOW_PERSISTENCE_VOLATILE
        || retire_is_due(map) || retire_is_locked(map))
        return;
    make_room(map);
    good = retired->moved ? find_good_address(map) : NULL;
    retired->count = retired->next = 0;
    for (struct run run = find_run(map, 0); good && run.first < run.end && !is_slow(map);
         run = find_run(map, run.end)) {
        /* Each slab may become a mapping of its own there; and traps need some meanwhile. */
        if (vmas_used(map) + retired->count + (run.end - run.first) > map->vma_budget / 4 * 3)
            break;
        move_run(map, good, &run, &row);
    }
    vmas_add(map, (int)retired->count);
    __atomic_store_n(&retired->due, retired->count > 0, __ATOMIC_RELEASE);
}

bool retire_is_due(const struct pcow_map *map)
{
    return __atomic_load_n(&map->retired.due, __ATOMIC_ACQUIRE);
}

/*
 * The next slab of what was moved. What is unmapped is nobody's: somebody else may be there the
 * next moment.
 */
static bool unmap_slab(struct pcow_map *map)
{
    struct retired *retired = &map->retired;
    struct moved *moved = &retired->moved[retired->next];

    if (munmap(moved->address, PCOW_SLAB_SIZE))
        return false;
    moved->address += PCOW_SLAB_SIZE;
    moved->length -= PCOW_SLAB_SIZE;
    if (moved->length == 0) {
        retired->next++;
        vmas_add(map, -1);
    }
    return true;
}

bool retire_some(struct pcow_map *map)
{
    struct retired *retired = &map->retired;

    if (!retire_is_due(map))
        return false;
    /* Others' mmap() waits for each of them. */
    for (unsigned slab = 0; slab < AT_ONCE && retired->next < retired->count; slab++)
        if (!unmap_slab(map))
            /*
             * no mapping is left for the two parts of one; when the thread wakes up again, perhaps
             */
            return false;
    if (retired->next < retired->count)
        return true;
    __atomic_store_n(&retired->due, false, __ATOMIC_RELEASE);
    return false;
}

void retire_end(struct pcow_map *map)
{
    struct retired *retired = &map->retired;

    for (; retired->next < retired->count; retired->next++, vmas_add(map, -1))
        munmap(retired->moved[retired->next].address, retired->moved[retired->next].length);
    free(retired->moved);
    *retired = (struct retired){0};
}
