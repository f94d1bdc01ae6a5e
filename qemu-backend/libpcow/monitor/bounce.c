/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Slabs that lie in more pieces, or have more holes (holes.c), than there are mappings for, and
 * that cannot become one piece in the file: of an image that is open for reading only, or on a full
 * pool. What the slab shows, but for what is mapped for stores, is copied to memory of its own, of
 * which nobody sees anything before all of it is there. It does not become stale: only what is
 * mapped for stores changes, and that is no part of the copy, or is mapped over it later. Of an image that is open for reading nobody writes to the file (who opened
 * it without its lock, PCOW_OPEN_FORCE_SHARE, is promised nothing), and what a snapshot shows
 * stays.
 */
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "monitor/monitor.h"
#include "monitor/policy.h"

/* Into memory that is zero, so that what has no block takes none of it. */
static int read_data(const struct file *file, uint64_t offset, uint64_t length, uint8_t *to)
{
    uint64_t end = offset + length;
    struct stat status;
    int ret = 0;

    /* What lies behind the end of a file that was cut short is lost, and no zeros. */
    if (lost_is_in(file, offset, length) || fstat(file->fd, &status)
        || end > (uint64_t)status.st_size)
        return -EIO;
    for (uint64_t data = offset; (data = file_next_data(file, data, end)) < end && !ret;) {
        uint64_t hole = file_next_hole(file, data, end);

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

/* What is not mapped for stores. */
static int read_slab(const struct pcow_map *map, uint64_t guest_slab, uint8_t *copy)
{
    const struct page_set *writable = &map->slabs[guest_slab].writable;
    unsigned end, pages = layout_pages(map, guest_slab);
    int ret = 0;

    for (unsigned page = 0; page < pages && !ret; page = end) {
        end = page_set_run_end(writable, page, pages);
        if (!page_set_has(writable, page))
            ret = read_run(map, guest_slab, page, end, copy);
    }
    return ret;
}

/*
 * What is mapped for stores stays as it is: the kernel may be about to store there for a system
 * call (with O_DIRECT it has looked the page up long ago), and that would be in the file alone.
 * Each run between becomes its part of the copy at once: who traps meanwhile finds it there when he
 * gets the claim. Gives the mappings that the slab has then; the copy is gone in any case.
 */
static int show_copy(struct pcow_map *map, uint64_t guest_slab, uint8_t *copy)
{
    const struct page_set *writable = &map->slabs[guest_slab].writable;
    unsigned end, pages = layout_pages(map, guest_slab);
    uint8_t *to = map->address + (guest_slab << SLAB_BITS);
    int ret = 0, runs = 0;

    for (unsigned page = 0; page < pages; page = end, runs++) {
        size_t at = page * PCOW_PAGE_SIZE, length;

        end = page_set_run_end(writable, page, pages);
        length = (end - page) * PCOW_PAGE_SIZE;
        if (!ret && !page_set_has(writable, page)
            && mremap(copy + at, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to + at)
                   != MAP_FAILED)
            continue;
        if (!ret && !page_set_has(writable, page))
            ret = -errno;
        munmap(copy + at, length);
    }
    return ret ? ret : runs;
}

/* Would it take mappings that others need? */
static bool is_too_much(const struct pcow_map *map, uint64_t guest_slab)
{
    return policy_is_too_much(layout_count_pieces(map, guest_slab),
                              vmas_used(map) - map->slabs[guest_slab].pieces, 0, map->vma_budget);
}

int bounce_now(struct pcow_map *map, uint64_t guest_slab)
{
    size_t length = layout_pages(map, guest_slab) * PCOW_PAGE_SIZE;
    struct slab_map *slab = &map->slabs[guest_slab];
    uint8_t *copy;
    int ret;

    /* While nobody knows what is mapped for stores, a copy would lack what is stored meanwhile. */
    if (__atomic_load_n(&map->unknown, __ATOMIC_SEQ_CST))
        return -EBUSY;
    copy = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
    if (copy == MAP_FAILED)
        return -errno;
    ret = read_slab(map, guest_slab, copy);
    if (!ret && mprotect(copy, length, PROT_READ))
        ret = -errno;
    if (ret) {
        munmap(copy, length);
        return ret;
    }
    ret = show_copy(map, guest_slab, copy);
    if (ret < 0) {
        /* A part of it may be there, and nothing at all where the next one was to be. */
        layout_unmap_slab(map, guest_slab);
        return ret;
    }
    layout_set_pieces(map, slab, (unsigned)ret);
    slab->holes = 0;
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
