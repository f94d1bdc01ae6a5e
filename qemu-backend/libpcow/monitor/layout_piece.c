/* SPDX-License-Identifier: BSD-3-Clause */
/* Which file shows at which address: stretches that one mapping can serve. */
#include "monitor/layout.h"

#include <sys/mman.h>

#include "chain/index.h"
#include "image/prepare.h"
#include "monitor/monitor.h"
#include "util/map_at.h"

/*
 * Were all these pages handed out as prepared ones, and nothing is known to have happened to their
 * blocks since?
 */
static bool is_settled(const struct pcow_image *image, uint64_t offset, size_t length)
{
    for (uint64_t end = offset + length; offset < end;) {
        unsigned page = (unsigned)(offset / PCOW_PAGE_SIZE % PAGES_PER_SLAB), last = PAGES_PER_SLAB;

        if (!prepared_run(image, offset >> SLAB_BITS, page, &last))
            return false;
        offset += (last - page) * PCOW_PAGE_SIZE;
    }
    return true;
}

int layout_map_file(void *address, size_t length, const struct pcow_image *file, uint64_t offset,
                    bool write, int fixed)
{
    bool settled = write && file->file.persist.fixed_blocks && is_settled(file, offset, length);
    int ret = file_map(&file->file, address, length, offset,
                       !write    ? FILE_MAP_LOADS
                       : settled ? FILE_MAP_SETTLED
                                 : FILE_MAP_STORES,
                       fixed);

    if (ret)
        return ret;
    /*
     * Without readahead the page cache holds single pages. A store to one page of a larger folio
     * makes the file system reserve blocks for all of it. What others read is another matter: see
     * layout_prepare_store().
     */
    if (file->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        madvise(address, length, MADV_RANDOM);
    return 0;
}

/*
 * Private and read-only: loads see the kernel's zero page, without a trap and without memory;
 * stores trap.
 */
static int map_absent(void *address, size_t length, int fixed)
{
    return map_at(address, length, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed,
                  -1, 0);
}

int piece_map(struct pcow_map *map, const struct piece *piece)
{
    const struct pcow_image *file = piece->level ? map->image->chain->file[piece->level] : NULL;
    void *address = map->address + piece->from;
    size_t length = piece->to - piece->from;
    int fixed, ret;

    if (length == 0)
        return 0;
    fixed = reserve_next(map, piece->from, piece->to, file && file->file.lost_pages.any);
    if (fixed < 0)
        return fixed;
    ret = file ? layout_map_file(address, length, file, piece->offset, piece->store, fixed)
               : map_absent(address, length, fixed);
    if (!ret)
        reserve_taken(map, piece->to);
    return ret;
}

/*
 * Own pages that may have no blocks are mapped as those of an older layer are, and the first store
 * traps, see resolve_write().
 */
static bool may_store(const struct pcow_map *map, const struct place *place)
{
    return place->own && map->image->file.writable
           && slab_is_backed(map->image, place->offset >> SLAB_BITS);
}

static bool continues(const struct pcow_map *map, const struct piece *piece,
                      const struct place *place)
{
    unsigned level = place->present ? place->level : 0;

    return piece->level == level && piece->store == may_store(map, place)
           && (level == 0 || place->offset == piece->offset + (piece->to - piece->from));
}

/* Extend the piece under construction by one slab, mapping what is complete. */
int piece_add_slab(struct pcow_map *map, uint64_t guest_slab, struct piece *piece)
{
    unsigned pages = layout_pages(map, guest_slab);

    index_update(map->image, guest_slab);
    for (unsigned page = 0; page < pages;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);
        uint64_t from = (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;

        if (!continues(map, piece, &place) || piece->to != from) {
            int ret = piece_map(map, piece);

            if (ret)
                return ret;
            *piece = (struct piece){from, from, place.present ? place.level : 0, place.offset,
                                    may_store(map, &place)};
        }
        piece->to = from + place.pages * PCOW_PAGE_SIZE;
        page += place.pages;
    }
    return 0;
}

/* All that is not used, up to there. */
int piece_add_absent(struct pcow_map *map, uint64_t to, struct piece *piece)
{
    if (piece->to >= to)
        return 0;
    if (piece->level) {
        int ret = piece_map(map, piece);

        if (ret)
            return ret;
        *piece = (struct piece){.from = piece->to, .to = piece->to};
    }
    piece->to = to;
    return 0;
}
