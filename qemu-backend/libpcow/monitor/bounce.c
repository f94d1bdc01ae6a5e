/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Slabs that lie in more pieces, or have more holes (holes.c), than there are mappings for, and
 * that cannot become one piece in the file: of an image that is open for reading only, or on a full
 * pool. What the slab shows is copied to memory of its own, of which nobody sees anything before
 * all of it is there; if the slab is mapped, but for its own pages. It does not become stale: only
 * what is mapped for stores changes, and that is no part of the copy, or is mapped over it later.
 * Of an image that is open for reading nobody writes to the file (who opened it without its lock,
 * PCOW_OPEN_FORCE_SHARE, is promised nothing), and what a snapshot shows stays.
 */
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/map_at.h"

/* Into memory that is zero: what has no block in a pool in memory takes none of it either. */
static int read_data(const struct file *file, uint64_t offset, uint64_t length, uint8_t *to)
{
    uint64_t end = offset + length, data = offset;
    bool sparse = file->persist.persistence == PCOW_PERSISTENCE_VOLATILE;
    struct stat status;
    int ret = 0;

    /* What lies behind the end of a file that was cut short is lost, and no zeros. */
    if (lost_is_in(file, offset, length) || fstat(file->fd, &status)
        || end > (uint64_t)status.st_size)
        return -EIO;
    while (!ret && data < end && (data = sparse ? file_next_data(file, data, end) : data) < end) {
        uint64_t hole = sparse ? file_next_hole(file, data, end) : end;

        ret = file_read(file, data, to + (data - offset), hole - data);
        data = hole;
    }
    return ret;
}

static int read_run(const struct pcow_map *map, uint64_t guest_slab, unsigned page, unsigned end,
                    uint8_t *slab)
{
    int ret = 0;

    while (page < end && !ret) {
        struct place place = chain_find(map->image, guest_slab, page, end - page);

        if (place.present)
            ret = read_data(&map->image->chain->file[place.level]->file, place.offset,
                            place.pages * PCOW_PAGE_SIZE, slab + page * PCOW_PAGE_SIZE);
        page += place.pages;
    }
    return ret;
}

/* Own pages, and those of them that have a block. */
struct own {
    struct page_set all, backed;
};

static void find_backed(const struct file *file, unsigned page, const struct place *place,
                        struct page_set *backed)
{
    uint64_t end = place->offset + place->pages * PCOW_PAGE_SIZE, data = place->offset;

    while (data < end && (data = file_next_data(file, data, end)) < end) {
        uint64_t hole = file_next_hole(file, data, end);

        page_set_add_range(backed, page + (unsigned)((data - place->offset) / PCOW_PAGE_SIZE),
                           (unsigned)((hole - data) / PCOW_PAGE_SIZE));
        data = hole;
    }
}

static struct own find_own(const struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pages = layout_pages(map, guest_slab);
    struct own own = {0};

    for (unsigned page = 0; page < pages && map->image->file.writable;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);

        if (place.own) {
            page_set_add_range(&own.all, page, place.pages);
            find_backed(&map->image->file, page, &place, &own.backed);
        }
        page += place.pages;
    }
    return own;
}

/* ---- the copy -------------------------------------------------------------------------------- */

/* stays: pages that are none of it. */
static int read_slab(const struct pcow_map *map, uint64_t guest_slab,
                     const struct page_set *stays, uint8_t *copy)
{
    unsigned end, pages = layout_pages(map, guest_slab);
    int ret = 0;

    for (unsigned page = 0; page < pages && !ret; page = end) {
        end = page_set_run_end(stays, page, pages);
        if (!page_set_has(stays, page))
            ret = read_run(map, guest_slab, page, end, copy);
    }
    return ret;
}

/* As the chain has it, for loads. */
static int map_run(struct pcow_map *map, uint64_t guest_slab, unsigned page, unsigned end)
{
    int ret = 0;

    while (page < end && !ret) {
        struct place place = chain_find(map->image, guest_slab, page, end - page);
        uint8_t *address = map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;
        size_t length = place.pages * PCOW_PAGE_SIZE;

        ret = place.present
                  ? layout_map_file(address, length, map->image->chain->file[place.level],
                                    place.offset, false, MAP_FIXED)
                  : map_at(address, length, PROT_READ,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        page += place.pages;
    }
    return ret;
}

/*
 * Each run that does not stay becomes its part of the copy, at once: who traps meanwhile finds it
 * there when he gets the claim. The copy is gone in any case. If the kernel moves one no more, that
 * one is mapped anew, as it may have been taken away; what was moved shows the same as before.
 */
static int show_copy(struct pcow_map *map, uint64_t guest_slab, const struct page_set *stays,
                     uint8_t *copy)
{
    unsigned end, pages = layout_pages(map, guest_slab);
    uint8_t *to = map->address + (guest_slab << SLAB_BITS);
    int ret = 0;

    for (unsigned page = 0; page < pages; page = end) {
        size_t at = page * PCOW_PAGE_SIZE, length;

        end = page_set_run_end(stays, page, pages);
        length = (end - page) * PCOW_PAGE_SIZE;
        if (!ret && !page_set_has(stays, page)) {
            if (mremap(copy + at, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to + at)
                != MAP_FAILED)
                continue;
            ret = -errno;
            if (map_run(map, guest_slab, page, end))
                layout_unmap_slab(map, guest_slab);
        }
        munmap(copy + at, length);
    }
    return ret;
}

/* So many mappings it has then. */
static unsigned count_runs(const struct pcow_map *map, uint64_t guest_slab,
                           const struct page_set *stays)
{
    unsigned end, pages = layout_pages(map, guest_slab), runs = 0;

    for (unsigned page = 0; page < pages; page = end, runs++) {
        end = page_set_run_end(stays, page, pages);
        /* Of several file slabs, after a merge. */
        if (page_set_has(stays, page))
            end = page + chain_find(map->image, guest_slab, page, end - page).pages;
    }
    return runs;
}

/* Would it take mappings that others need? */
static bool is_too_much(const struct pcow_map *map, uint64_t guest_slab)
{
    return policy_is_too_much(layout_count_pieces(map, guest_slab),
                              vmas_used(map) - map->slabs[guest_slab].pieces, 0, map->vma_budget);
}

/*
 * Mappings that later stores may make, and which the chain will not tell: of own pages in the copy,
 * each of which is mapped over it alone.
 */
static uint16_t count_hidden(const struct own *own, const struct page_set *stays)
{
    unsigned count = 0;

    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        count += 2 * (unsigned)__builtin_popcountll(own->all.word[w] & ~stays->word[w]);
    return (uint16_t)(count < PAGES_PER_SLAB ? count : PAGES_PER_SLAB);
}

int bounce_now(struct pcow_map *map, uint64_t guest_slab)
{
    size_t length = layout_pages(map, guest_slab) * PCOW_PAGE_SIZE;
    struct slab_map *slab = &map->slabs[guest_slab];
    const struct own own = find_own(map, guest_slab);
    struct page_set stays = {{0}};
    uint8_t *copy;
    int ret;

    /* While nobody knows what is mapped for stores, a copy would lack what is stored meanwhile. */
    if (__atomic_load_n(&map->unknown, __ATOMIC_SEQ_CST))
        return -EBUSY;
    /*
     * The kernel may be about to store to a page that is or was mapped for stores, for a system
     * call that has looked it up long ago (O_DIRECT), and that would be in the file alone. Such a
     * page is own and has a block.
     */
    if (slab_state(&slab->status) == SLAB_MAPPED)
        stays = own.backed;
    copy = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
    if (copy == MAP_FAILED)
        return -errno;
    ret = read_slab(map, guest_slab, &stays, copy);
    if (!ret && mprotect(copy, length, PROT_READ))
        ret = -errno;
    if (ret) {
        munmap(copy, length);
        return ret;
    }
    ret = show_copy(map, guest_slab, &stays, copy);
    if (!ret || !slab_is_unmapped(&slab->status)) {
        layout_set_pieces(map, slab, count_runs(map, guest_slab, &stays));
        slab->holes = count_hidden(&own, &stays);
    }
    if (ret)
        return ret;
    slab_refresh(&slab->status);
    layout_enter(map, guest_slab, SLAB_BOUNCE);
    return 0;
}

int bounce_slab(struct pcow_map *map, uint64_t guest_slab)
{
    /*
     * For a page that cannot be read, or for want of memory, nobody must suffer who loads another
     * one: then it takes the mappings after all, and who loads that page is told by the kernel, or
     * by resolve().
     */
    return is_too_much(map, guest_slab) && bounce_now(map, guest_slab) == 0
               ? 0
               : layout_map_slab(map, guest_slab);
}
