/* SPDX-License-Identifier: BSD-3-Clause */
/* Which file shows at which address, in as few memory mappings as possible. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "monitor/monitor.h"
#include "util/error.h"

static int map_file(const struct pcow_map *map, void *address, size_t length, const struct pcow_image *file, uint64_t offset, bool write)
{
    int flags = MAP_FIXED | (file->file.persist.persistence == PCOW_PERSISTENCE_PMEM && write ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED);
    int protection = PROT_READ | (write ? PROT_WRITE : 0);

    (void)map;
    if (mmap(address, length, protection, flags, file->file.fd, (off_t)offset) == MAP_FAILED)
        return -errno;
    /*
     * Without readahead the page cache holds single pages. A store to one page of a larger folio makes the file system (ext4, Linux
     * 6.16 and later) reserve blocks for all of it: up to 2 MiB for 4 KiB, and SIGBUS if the pool is nearly full.
     */
    if (file->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        madvise(address, length, MADV_RANDOM);
    return 0;
}

/* A stretch of the range that one mapping can serve. */
struct piece {
    uint64_t from, to;                 /* guest offsets */
    unsigned level;                    /* 0: absent */
    uint64_t offset;
    bool own;
};

static int map_piece(struct pcow_map *map, const struct piece *piece)
{
    const struct pcow_image *image = map->image;
    void *address = map->address + piece->from;
    size_t length = piece->to - piece->from;

    if (length == 0)
        return 0;
    if (piece->level == 0)
        return map->engine->map_absent(map, address, length);
    return map_file(map, address, length, image->chain->file[piece->level], piece->offset,
                    piece->own && image->file.writable);
}

static bool continues(const struct piece *piece, const struct place *place)
{
    unsigned level = place->present ? place->level : 0;

    return piece->level == level && piece->own == place->own
        && (level == 0 || place->offset == piece->offset + (piece->to - piece->from));
}

static unsigned pages_in_slab(const struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t left = (map->size - (guest_slab << SLAB_BITS)) / PCOW_PAGE_SIZE;

    return left < PAGES_PER_SLAB ? (unsigned)left : PAGES_PER_SLAB;
}

static unsigned count_pieces(const struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pieces = 0, pages = pages_in_slab(map, guest_slab);

    for (unsigned page = 0; page < pages; pieces++)
        page += chain_find(map->image, guest_slab, page, pages - page).pages;
    return pieces;
}

static void remember(struct pcow_map *map, uint64_t guest_slab, unsigned pieces)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    __atomic_add_fetch(&map->vmas, pieces - slab->pieces, __ATOMIC_RELAXED);
    slab->pieces = (uint16_t)pieces;
    if (!slab->cold && map->image->file.writable && map->image->view == image_active(map->image))
        chain_own_pages(map->image, guest_slab, &slab->writable);
    else
        memset(&slab->writable, 0, sizeof slab->writable);
}

/* Extend the piece under construction by one slab, mapping what is complete. */
static int add_slab(struct pcow_map *map, uint64_t guest_slab, struct piece *piece)
{
    unsigned pages = pages_in_slab(map, guest_slab);

    for (unsigned page = 0; page < pages;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);
        uint64_t from = (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;

        if (!continues(piece, &place) || piece->to != from) {
            int ret = map_piece(map, piece);

            if (ret)
                return ret;
            *piece = (struct piece){from, from, place.present ? place.level : 0, place.offset, place.own};
        }
        piece->to = from + place.pages * PCOW_PAGE_SIZE;
        page += place.pages;
    }
    return 0;
}

int layout_map_slab(struct pcow_map *map, uint64_t guest_slab)
{
    struct piece piece = {0};
    int ret;

    map->slabs[guest_slab].cold = 0;
    ret = add_slab(map, guest_slab, &piece);
    if (!ret)
        ret = map_piece(map, &piece);
    if (!ret)
        remember(map, guest_slab, count_pieces(map, guest_slab));
    return ret;
}

int layout_map_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    for (unsigned page = first; page < first + count;) {
        struct place place = chain_find(map->image, guest_slab, page, first + count - page);
        uint64_t from = (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;
        int ret;

        if (!place.own)
            return -EIO;
        ret = map_file(map, map->address + from, place.pages * PCOW_PAGE_SIZE, map->image, place.offset, true);
        if (ret)
            return ret;
        /* At most it cuts one mapping in two with itself between. */
        slab->pieces = (uint16_t)(slab->pieces + 2);
        __atomic_add_fetch(&map->vmas, 2, __ATOMIC_RELAXED);
        for (unsigned p = page; p < page + place.pages; p++)
            __atomic_fetch_or(&slab->writable.word[p / 64], UINT64_C(1) << (p % 64), __ATOMIC_RELEASE);
        page += place.pages;
    }
    return 0;
}

/* Nothing is mapped; the first access, load or store, brings the whole slab into the active layer as one piece. */
static int map_cold(struct pcow_map *map, uint64_t guest_slab, uint64_t length)
{
    void *address = map->address + (guest_slab << SLAB_BITS);

    map->slabs[guest_slab].cold = 1;
    remember(map, guest_slab, 1);
    return mmap(address, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED ? -errno : 0;
}

int layout_map_all(struct pcow_map *map, struct pcow_error *error)
{
    uint64_t slabs = map->image->chain->guest_slabs;
    struct piece piece = {0};
    int ret = 0;

    for (uint64_t v = 0; v < slabs && ret == 0; v++) {
        unsigned pieces = count_pieces(map, v);
        /* Every slab needs one at least; a slab of many pieces may have them while what is left suffices for the others. */
        uint64_t reserved = slabs - v;

        if (pieces > 1 && map->image->file.writable && map->vmas + pieces + reserved > map->vma_budget) {
            ret = map_piece(map, &piece);
            piece = (struct piece){.from = (v + 1) << SLAB_BITS, .to = (v + 1) << SLAB_BITS};
            if (!ret)
                ret = map_cold(map, v, pages_in_slab(map, v) * PCOW_PAGE_SIZE);
            continue;
        }
        map->slabs[v].cold = 0;
        ret = add_slab(map, v, &piece);
        remember(map, v, pieces);
    }
    if (!ret)
        ret = map_piece(map, &piece);
    return ret ? error_set_errno(error, ret, "cannot map %s (vm.max_map_count may be too low for it)", map->image->file.path) : 0;
}
