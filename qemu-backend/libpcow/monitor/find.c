/* SPDX-License-Identifier: BSD-3-Clause */
/* What the guest sees of a place in memory that the library has of a file. */
#include "chain/chain.h"
#include "monitor/monitor.h"

static bool find_in_file(const struct pcow_map *map, const struct pcow_image *image, uint64_t offset, uint64_t *guest_offset)
{
    uint64_t slab = offset >> SLAB_BITS, page = offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB, guest_slab;
    struct place place;

    if (image->format1 || slab >= image->slab_count || image->slabs[slab].kind != OWNER_DATA)
        return false;
    guest_slab = image->slabs[slab].number;
    if (guest_slab << SLAB_BITS >= map->size)
        return false;
    place = chain_find(map->image, guest_slab, (unsigned)page, 1);
    if (!place.present || map->image->chain->file[place.level] != image || place.offset != (offset & ~(PCOW_PAGE_SIZE - 1)))
        return false;                  /* a snapshot's, or of a page that was copied since */
    *guest_offset = (guest_slab << SLAB_BITS) + offset % PCOW_SLAB_SIZE;
    return true;
}

bool pcow_map_find(const pcow_map *map, const void *address, uint64_t *offset)
{
    const uint8_t *at = address;
    uint64_t in_file;

    if (at >= map->address && at < map->address + map->size) {
        *offset = (uint64_t)(at - map->address);
        return true;
    }
    for (const struct pcow_image *image = map->image; image; image = image->base)
        if (file_find_window_at(&image->file, at, &in_file))
            return find_in_file(map, image, in_file, offset);
    return false;
}
