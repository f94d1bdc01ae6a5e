/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Slabs that lie in more pieces, or have more holes (holes.c), than there are mappings for, and
 * that cannot become one piece in the file: of an image that is open for reading only, or on a full
 * pool. What the slab shows is copied to memory of its own, of which nobody sees anything before
 * all of it is there. It does not become stale: only what is mapped for stores changes, and that is
 * mapped over the copy. Of an image that is open for reading nobody writes to the file (who opened
 * it without its lock, PCOW_OPEN_FORCE_SHARE, is promised nothing), and what a snapshot shows
 * stays. Of an own page in it nobody has an address in the file: nothing was mapped before, or the
 * kernel has refused twice to map it.
 */
#include <errno.h>
#include <sys/mman.h>

#include "monitor/monitor.h"
#include "monitor/policy.h"

/* Into memory that is zero, as what nothing holds is. */
static int read_slab(const struct pcow_map *map, uint64_t guest_slab, uint8_t *to)
{
    unsigned pages = layout_pages(map, guest_slab);
    int ret = 0;

    for (unsigned page = 0; page < pages && ret == 0;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);

        if (place.present)
            ret = file_read(&map->image->chain->file[place.level]->file, place.offset,
                            to + page * PCOW_PAGE_SIZE, place.pages * PCOW_PAGE_SIZE);
        page += place.pages;
    }
    return ret;
}

/* NULL with errno. */
static uint8_t *make_copy(const struct pcow_map *map, uint64_t guest_slab, size_t length)
{
    uint8_t *copy = mmap(NULL, length, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int ret;

    if (copy == MAP_FAILED)
        return NULL;
    ret = read_slab(map, guest_slab, copy);
    if (!ret && mprotect(copy, length, PROT_READ))
        ret = -errno;
    if (!ret)
        return copy;
    munmap(copy, length);
    errno = -ret;
    return NULL;
}

/*
 * One mapping takes the place of what is there at once: who traps meanwhile finds it there when he
 * gets the claim.
 */
static int show_copy(struct pcow_map *map, uint64_t guest_slab, uint8_t *copy, size_t length)
{
    uint8_t *to = map->address + (guest_slab << SLAB_BITS);
    unsigned char present[PAGES_PER_SLAB];
    int ret;

    if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED)
        return 0;
    ret = -errno;
    munmap(copy, length);
    /* Only if what was there is gone: holes of it that are shown already may be needed together. */
    if (!slab_is_unmapped(&map->slabs[guest_slab].status) && mincore(to, length, present)
        && errno == ENOMEM)
        layout_map_slab(map, guest_slab);
    return ret;
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
    copy = make_copy(map, guest_slab, length);
    if (!copy)
        return -errno;
    ret = show_copy(map, guest_slab, copy, length);
    if (ret)
        return ret;
    vmas_begin(map, slab);
    vmas_add(map, 1 - (int)slab->pieces);
    slab->pieces = 1;
    slab->holes = 0;
    slab_refresh(&slab->status);
    layout_enter(map, guest_slab, SLAB_BOUNCE);
    return 0;
}

/* Of an own page, which a system call may be storing to, no copy is made if it can be helped. */
static bool may_be_stored_to(const struct pcow_map *map, uint64_t guest_slab)
{
    struct page_set own;

    chain_own_pages(map->image, guest_slab, &own);
    return map->image->file.writable && map->slabs[guest_slab].refused && !page_set_empty(&own);
}

int bounce_slab(struct pcow_map *map, uint64_t guest_slab)
{
    if (may_be_stored_to(map, guest_slab) && layout_map_slab(map, guest_slab) == 0)
        return 0;
    /*
     * For a page that cannot be read, or for want of memory, nobody must suffer who loads another
     * one: then it takes the mappings after all, and who loads that page is told by the kernel, or
     * by resolve().
     */
    return is_too_much(map, guest_slab) && bounce_now(map, guest_slab) == 0
               ? 0
               : layout_map_slab(map, guest_slab);
}
