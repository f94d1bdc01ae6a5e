/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Page tables of the windows (image/window.c), through which slabs are prepared and copied. They
 * are needed once: what has come to the guest is accessed by its own mapping. Left where they are
 * they would take as much as the guest's, 0.2 % of each file of the chain; so the thread gives them
 * back when nothing was served for a while. Whoever comes after that pays a page fault for each 16
 * pages of what he copies.
 */
#include "monitor/monitor.h"

/* Slabs: half a millisecond for which mmap() of others waits, if the tables are full. */
#define AT_ONCE 32u

/* What is ready for the next store keeps its table: to have it is a part of being ready. */
static bool is_done(const struct pcow_image *image, const struct pcow_image *top, uint64_t slab)
{
    return image != top || slab_peek(image, slab).kind == OWNER_DATA;
}

/* Some slabs from this one on, in one group; the first that may be left. */
static uint64_t empty_some(const struct pcow_image *image, const struct pcow_image *top,
                           uint64_t slab)
{
    uint64_t slabs = __atomic_load_n(&image->file.size, __ATOMIC_ACQUIRE) >> SLAB_BITS, end = slab;

    while (end < slabs && end < slab + AT_ONCE && end / SLABS_PER_GROUP == slab / SLABS_PER_GROUP
           && is_done(image, top, end))
        end++;
    if (end == slab)
        return slab + 1;
    /* If the kernel refuses, all is as it was. */
    file_empty_window(&image->file, slab << SLAB_BITS, (end - slab) << SLAB_BITS);
    return end;
}

static bool is_wanted(const struct pcow_map *map, uint64_t accesses)
{
    return ahead_is_stopping(&map->ahead) || accesses_served(map) != accesses;
}

bool windows_empty(struct pcow_map *map)
{
    uint64_t accesses = accesses_served(map), slab = 0;
    unsigned level = 0;

    /* In class pmem most entries are of 2 MiB. mmap() fills the tables of memory that is locked. */
    if (map->image->file.persist.persistence == PCOW_PERSISTENCE_PMEM || retire_is_locked(map))
        return true;
    for (;;) {
        const struct pcow_image *image = map->image;

        if (is_wanted(map, accesses))
            return false;
        turnstile_take(map);
        /* By number: an operation between two turns may have put another base there. */
        for (unsigned i = 0; i < level && image; i++)
            image = image->base;
        if (image && slab < __atomic_load_n(&image->file.size, __ATOMIC_ACQUIRE) >> SLAB_BITS
            && !__atomic_load_n(&image->file.lost_pages.any, __ATOMIC_ACQUIRE)) {
            slab = empty_some(image, map->image, slab);
        } else {
            level++;
            slab = 0;
        }
        turnstile_release(map);
        if (!image)
            return true;
    }
}
