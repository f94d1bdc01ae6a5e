/* SPDX-License-Identifier: BSD-3-Clause */
/* A slab of which every page has become own while a part of it was mapped for stores already. */
#include <errno.h>

#include "image/prepare.h"
#include "monitor/monitor.h"

#define FEW_PIECES 4u

/* Map what is own and not yet mapped, without touching the rest, whose page table is filled. */
static int map_missing(struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pages = layout_pages(map, guest_slab);
    int ret = 0;

    for (unsigned page = 0; page < pages && ret == 0;) {
        unsigned end = page_set_run_end(&map->slabs[guest_slab].writable, page, pages);

        if (!page_set_has(&map->slabs[guest_slab].writable, page)) {
            ret = layout_map_own(map, guest_slab, page, end - page);
            if (!ret && slab_is_kept(&map->slabs[guest_slab].status))
                ret = slab_keeper(map, guest_slab)->page_ready(map, guest_slab, page, end - page);
            else if (!ret)
                layout_populate(map, guest_slab, page, end - page);
        }
        page = end;
    }
    return ret;
}

/*
 * Where several threads store, the kernel interrupts the others' CPUs for each mapping that goes
 * and was stored to, 25 us each in a virtual machine: a slab with many of them is mapped sooner
 * piece by piece.
 */
static bool would_interrupt(const struct pcow_map *map, uint64_t guest_slab)
{
    return map->slabs[guest_slab].pieces > FEW_PIECES
           && __atomic_load_n(&map->trappers.turns, __ATOMIC_RELAXED) != 0;
}

/*
 * Can the window's page table take the place of the slab's? The kernel moves it as one entry, in 3
 * us where filling it takes 50 to 130. What it has is what has blocks: pages that were prepared or
 * copied, all of one file slab. Under KVM mappings that vCPUs store to stay as they are.
 */
static bool can_move(const struct pcow_map *map, uint64_t guest_slab, struct place *place)
{
    if (map->image->file.persist.persistence != PCOW_PERSISTENCE_VOLATILE
        || map->engine->keeps_tables || layout_pages(map, guest_slab) < PAGES_PER_SLAB
        || would_interrupt(map, guest_slab))
        return false;
    *place = chain_find(map->image, guest_slab, 0, PAGES_PER_SLAB);
    return place->own && place->pages == PAGES_PER_SLAB
           && slab_is_backed(map->image, place->offset >> SLAB_BITS);
}

int layout_map_rest(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    struct place place;

    if (!can_move(map, guest_slab, &place))
        return map_missing(map, guest_slab);
    if (file_move_window(&map->image->file, map->address + (guest_slab << SLAB_BITS),
                         place.offset)) {
        /*
         * Perhaps after the old mapping was taken away: what is not there must not be believed to
         * be writable.
         */
        int ret = layout_map_slab(map, guest_slab);

        if (!ret)
            layout_populate(map, guest_slab, 0, PAGES_PER_SLAB);
        return ret;
    }
    vmas_begin(map, slab);
    vmas_add(map, 1 - (int)slab->pieces);
    slab->pieces = 1;
    slab->holes = 0;
    slab_refresh(&slab->status);
    layout_enter(map, guest_slab, SLAB_MAPPED);
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        __atomic_store_n(&slab->writable.word[w], ~UINT64_C(0), __ATOMIC_RELEASE);
    /* The thread may not have come to all of its pages; those it did cost a load each. */
    if (!page_set_full(&map->image->prepared[place.offset >> SLAB_BITS]))
        layout_populate(map, guest_slab, 0, PAGES_PER_SLAB);
    return 0;
}
