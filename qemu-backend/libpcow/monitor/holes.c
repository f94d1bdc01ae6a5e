/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Valid pages without blocks, as zeros that were written have, or a copy of the file that leaves
 * zeros out. On tmpfs a load from one takes a block, and a full pool has none: the kernel fails the
 * load, with SIGBUS, EFAULT or in KVM. No load waits or fails for want of space, so one that did
 * finds the kernel's page of zeros in the place of the hole, which takes neither; or a copy of the
 * slab in memory, where mappings are short (bounce.c). A store to it traps as it did before.
 */
#include <sys/mman.h>
#include <sys/stat.h>

#include "monitor/monitor.h"
#include "util/map_at.h"

/* So many mappings one takes beside those of the slab. */
#define MORE_PIECES 2u
/*
 * Nobody waits or fails who only loads, so zeros may take a part of what is kept for others; so
 * much of the budget, or this.
 */
#define SHARE_OF_OTHERS 8u
#define LEAST_OF_OTHERS 256u

unsigned holes_at(const struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    const struct page_set *writable = &map->slabs[guest_slab].writable;
    struct place place =
        chain_find(map->image, guest_slab, page, layout_pages(map, guest_slab) - page);
    struct file *file;
    struct stat status;
    uint64_t data, end = place.offset + place.pages * PCOW_PAGE_SIZE;

    if (!place.present || page_set_has(writable, page))
        return 0;
    file = &map->image->chain->file[place.level]->file;
    /* What lies behind the end of a file that was cut short is lost, and no zeros. */
    if (file->persist.persistence != PCOW_PERSISTENCE_VOLATILE || fstat(file->fd, &status))
        return 0;
    if (end > (uint64_t)status.st_size)
        end = (uint64_t)status.st_size / PCOW_PAGE_SIZE * PCOW_PAGE_SIZE;
    if (end <= place.offset)
        return 0;
    data = file_next_data(file, place.offset, end);
    return page_set_run_end(writable, page,
                            page + (unsigned)((data - place.offset) / PCOW_PAGE_SIZE))
           - page;
}

static bool has_mappings_left(const struct pcow_map *map)
{
    unsigned more = map->vma_budget / SHARE_OF_OTHERS;

    if (more < LEAST_OF_OTHERS)
        more = LEAST_OF_OTHERS;
    return vmas_used(map) + MORE_PIECES <= map->vma_budget + more;
}

/*
 * The slab as a copy in memory: where it holds no page that anybody may store to. To an own one the
 * kernel may be storing for a system call that has looked it up long ago (O_DIRECT), and what it
 * stores would be in the file alone.
 */
static bool become_copy(struct pcow_map *map, uint64_t guest_slab)
{
    struct page_set own;

    chain_own_pages(map->image, guest_slab, &own);
    return (!map->image->file.writable || page_set_empty(&own))
           && bounce_now(map, guest_slab) == 0;
}

enum holes_answer holes_show(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    unsigned count, pieces = slab->pieces + MORE_PIECES;

    if (!slab_can_be_loaded_from(&slab->status) || slab_is_stale(&slab->status))
        return HOLES_UNRESOLVED;
    /* There is more by now than was asked for. */
    if (slab_state(&slab->status) != SLAB_MAPPED || page_set_has(&slab->writable, page))
        return HOLES_CHANGED;
    count = holes_at(map, guest_slab, page);
    if (count && !has_mappings_left(map)) {
        if (become_copy(map, guest_slab))
            return HOLES_SHOWN;
        if (slab_state(&slab->status) != SLAB_MAPPED)
            return HOLES_UNRESOLVED;
        /* No copy, as another page cannot be read, or memory is short: beyond all budgets, then. */
        pieces = slab->pieces + MORE_PIECES;
    }
    if (!count
        || map_at(map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                  count * PCOW_PAGE_SIZE, PROT_READ,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0))
        return HOLES_NONE;
    layout_set_pieces(map, slab, pieces < PAGES_PER_SLAB ? pieces : PAGES_PER_SLAB);
    slab->holes = (uint16_t)(slab->holes + MORE_PIECES < PAGES_PER_SLAB ? slab->holes + MORE_PIECES
                                                                        : PAGES_PER_SLAB);
    return HOLES_SHOWN;
}
