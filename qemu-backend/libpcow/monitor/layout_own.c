/* SPDX-License-Identifier: BSD-3-Clause */
/* Pages that the active layer holds: made so, and mapped for stores. */
#include <errno.h>
#include <sys/mman.h>

#include "monitor/layout.h"
#include "monitor/monitor.h"

/*
 * Every page is own and writable, and all of them lie in one piece of the file: adjacent mappings
 * have become one.
 */
static bool is_one_piece(const struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pages = layout_pages(map, guest_slab);

    return page_set_run_end(&map->slabs[guest_slab].writable, 0, pages) == pages
           && chain_find(map->image, guest_slab, 0, pages).pages == pages;
}

/*
 * Entries of 4 KiB stay as long as the mappings do that they were made for; one of 2 MiB can only
 * come into an empty table. So a slab that has become one piece is mapped once more. Who stores to
 * it meanwhile, vCPU or thread, finds the same page of the file under the old mapping or under the
 * new one: the kernel puts one in the other's place under its lock, and takes back what KVM has
 * derived from the old one before. Every page has blocks, or it would not be in writable.
 */
static int map_whole(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t offset = chain_find(map->image, guest_slab, 0, 1).offset;

    /*
     * If it fails, the old mapping may be gone. The next access maps what is there, and says what
     * is wrong.
     */
    if (layout_map_file(map->address + (guest_slab << SLAB_BITS),
                        layout_pages(map, guest_slab) * PCOW_PAGE_SIZE, map->image, offset, true,
                        MAP_FIXED))
        return layout_map_slab(map, guest_slab);
    return 0;
}

/*
 * The kernel refused to map them. It may have taken away what was there, or not: a trap must map it
 * anew, and nothing may rely on either.
 */
static void forget_pages(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    bool withdrawn = false;

    slab_grow_stale(&slab->status);
    /*
     * Around a lost page it takes several system calls: those before the one that failed have
     * mapped what is in no set.
     */
    if (map->lost)
        __atomic_store_n(&map->unknown, true, __ATOMIC_SEQ_CST);
    for (unsigned page = first; page < first + count; page++)
        if (page_set_has(&slab->writable, page)) {
            __atomic_store_n(&map->unknown, true, __ATOMIC_SEQ_CST);
            __atomic_fetch_and(&slab->writable.word[page / 64], ~(UINT64_C(1) << (page % 64)),
                               __ATOMIC_RELEASE);
            withdrawn = true;
        }
    if (withdrawn)
        layout_withdraw(map);
}

/*
 * Is the page before / behind the run mapped for stores, in the same mapping if the kernel can make
 * one of both?
 */
static bool continues_at(const struct pcow_map *map, uint64_t guest_slab, unsigned page,
                         uint64_t offset)
{
    return page < PAGES_PER_SLAB && page_set_has(&map->slabs[guest_slab].writable, page)
           && chain_find(map->image, guest_slab, page, 1).offset == offset;
}

/*
 * By how many mappings this run makes more of them at most: two, if it cuts one with itself
 * between. Not where a neighbour takes it in; if the kernel does not, as flags differ (MAP_SYNC,
 * madvise() by the program), there is at least nothing left on that side.
 */
static unsigned more_pieces(const struct pcow_map *map, uint64_t guest_slab, unsigned page,
                            const struct place *place)
{
    return 2u - continues_at(map, guest_slab, page - 1, place->offset - PCOW_PAGE_SIZE)
           - continues_at(map, guest_slab, page + place->pages,
                          place->offset + place->pages * PCOW_PAGE_SIZE);
}

static int map_own_run(struct pcow_map *map, uint64_t guest_slab, unsigned page,
                       const struct place *place)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    uint8_t *address = map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE;
    const struct slab_keeper *keeper =
        slab_is_kept(&slab->status) ? slab_keeper(map, guest_slab) : NULL;
    bool shown = keeper && keeper->shows(map, guest_slab, page, place->offset);
    unsigned pieces = slab->pieces + (shown ? 0 : more_pieces(map, guest_slab, page, place));
    int ret;

    /* A merge has given the layer another file slab. */
    if (keeper && !shown)
        return layout_map_slab(map, guest_slab);
    ret = shown ? 0
                : layout_map_file(address, place->pages * PCOW_PAGE_SIZE, map->image,
                                  place->offset, true, MAP_FIXED);
    if (ret) {
        forget_pages(map, guest_slab, page, place->pages);
        return ret;
    }
    layout_set_pieces(map, slab, pieces < PAGES_PER_SLAB ? pieces : PAGES_PER_SLAB);
    for (unsigned w = page / 64; !map->lost && w <= (page + place->pages - 1) / 64; w++)
        __atomic_fetch_or(&slab->writable.word[w], page_range_word(page, place->pages, w),
                          __ATOMIC_RELEASE);
    for (unsigned p = page; map->lost && p < page + place->pages; p++)
        if (!lost_is_in(&map->image->file, place->offset + (p - page) * PCOW_PAGE_SIZE,
                        PCOW_PAGE_SIZE))
            __atomic_fetch_or(&slab->writable.word[p / 64], UINT64_C(1) << (p % 64),
                              __ATOMIC_RELEASE);
    return 0;
}

/*
 * Is a page own that is mapped to where an older layer holds it? Also true of one that is mapped
 * where it is own, but for loads.
 */
static bool is_stale(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    struct page_set own;

    chain_own_pages(map->image, guest_slab, &own);
    lost_take_out(map, guest_slab, &own);
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (own.word[w] & ~page_set_word(&slab->writable, w))
            return true;
    return false;
}

int layout_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count,
               uint64_t *copied)
{
    uint64_t zeroed = 0, copies = 0;
    int ret;

    /* Whatever comes of it: only who has mapped what is own takes this back. */
    slab_grow_stale(&map->slabs[guest_slab].status);
    ret = chain_own(map->image, guest_slab, first, count, NULL, &copies, &zeroed);
    __atomic_fetch_add(&map->stats.pages_copied, copies, __ATOMIC_RELAXED);
    __atomic_fetch_add(&map->stats.pages_zeroed, zeroed, __ATOMIC_RELAXED);
    if (copied)
        *copied += copies;
    return ret;
}

int layout_own_whole(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t copied = 0;
    int ret = layout_own(map, guest_slab, 0, layout_pages(map, guest_slab), &copied);

    if (!ret && copied)
        __atomic_fetch_add(&map->stats.slabs_promoted, 1, __ATOMIC_RELAXED);
    return ret;
}

int layout_map_own(struct pcow_map *map, uint64_t guest_slab, unsigned first, unsigned count)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    unsigned pages = layout_pages(map, guest_slab), largest = 0;

    for (unsigned page = first; page < first + count;) {
        unsigned end = page_set_run_end(&slab->writable, page, first + count);

        /*
         * What is mapped for stores stays as it is: other CPUs may be using it, and would have to
         * be interrupted; vCPUs under KVM would leave the guest.
         */
        if (!page_set_has(&slab->writable, page)) {
            struct place place = chain_find(map->image, guest_slab, page, end - page);
            int ret = place.own ? map_own_run(map, guest_slab, page, &place) : -EIO;

            if (ret)
                return ret;
            end = page + place.pages;
            largest = place.pages > largest ? place.pages : largest;
        }
        page = end;
    }
    if (is_one_piece(map, guest_slab)) {
        layout_set_pieces(map, slab, 1);
        slab->holes = 0;
        slab_refresh(&slab->status);
        if (slab_is_kept(&slab->status))
            slab_keeper(map, guest_slab)->whole(map, guest_slab);
        else
            layout_enter(map, guest_slab, SLAB_MAPPED);
        if (map->image->file.huge && largest < pages)
            return map_whole(map, guest_slab);
    } else if (slab_age(&slab->status) == SLAB_STALE && !is_stale(map, guest_slab)) {
        slab_refresh(&slab->status);
    }
    return 0;
}

int layout_prepare_store(const struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    const struct slab_map *slab = &map->slabs[guest_slab];
    struct page_set mapped = {{0}};
    struct place place;

    if (map->image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE)
        return 0;
    place = chain_find(map->image, guest_slab, page, 1);
    if (!place.own)
        return 0;
    if (slab_state(&slab->status) == SLAB_BOUNCE)
        mapped = slab->writable;       /* the rest is a copy, see bounce.c */
    else
        page_set_add_range(&mapped, 0, PAGES_PER_SLAB);
    return file_prepare_store(&map->image->file,
                              map->address + (guest_slab << SLAB_BITS) + page * PCOW_PAGE_SIZE,
                              &mapped, place.offset, PCOW_PAGE_SIZE);
}
