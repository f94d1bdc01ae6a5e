/* SPDX-License-Identifier: BSD-3-Clause */
/* All of the range, in as few memory mappings as possible. */
#include "monitor/layout.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"
#include "util/error.h"

static uint64_t count_used(const struct chain *chain)
{
    uint64_t count = 0;

    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs;
         v = chain_next_used(chain, v + 1))
        count++;
    return count;
}

bool layout_is_to_be_copied(const struct pcow_map *map, uint64_t guest_slab)
{
    unsigned pages = layout_pages(map, guest_slab);

    if (!map->image->file.writable || !image_copies_on_read(map->image))
        return false;
    for (unsigned page = 0; page < pages;) {
        struct place place = chain_find(map->image, guest_slab, page, pages - page);

        if (place.present && !place.own)
            return true;
        page += place.pages;
    }
    return false;
}

int layout_map_all(struct pcow_map *map, struct pcow_error *error)
{
    const struct chain *chain = map->image->chain;
    uint64_t left = count_used(chain);
    struct piece piece = {0};
    int ret = 0;

    /* Nothing is mapped yet: one stretch. */
    if (map->slabs_counted == 0)
        vmas_add(map, 1);
    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs && ret == 0;
         v = chain_next_used(chain, v + 1), left--) {
        unsigned pieces = layout_count_pieces(map, v);
        /*
         * Every slab needs one at least; a slab of many pieces may have them while what is left
         * suffices for the others.
         */
        uint64_t reserved = 2 * left < chain->guest_slabs - v ? 2 * left : chain->guest_slabs - v;

        ret = piece_add_absent(map, v << SLAB_BITS, &piece);
        if (ret)
            break;
        if (policy_is_too_much(pieces, vmas_used(map), reserved, map->vma_budget)
            || layout_is_to_be_copied(map, v)) {
            ret = piece_map(map, &piece);
            piece = (struct piece){.from = (v + 1) << SLAB_BITS, .to = (v + 1) << SLAB_BITS};
            if (!ret)
                ret = layout_map_nothing(map, v);
            continue;
        }
        ret = piece_add_slab(map, v, &piece);
        layout_remember(map, v, SLAB_MAPPED, pieces);
    }
    if (!ret)
        ret = piece_add_absent(map, map->size, &piece);
    if (!ret)
        ret = piece_map(map, &piece);
    return ret ? error_set_errno(error, ret,
                                 "cannot map %s (vm.max_map_count may be too low for it)",
                                 map->image->file.path)
               : 0;
}

/* ---- after a revert, see lists.c ------------------------------------------------------------- */

int layout_map_changed(struct pcow_map *map, const struct layout_lists *lists)
{
    const struct chain *chain = map->image->chain;
    struct piece piece = {0};
    int ret = 0;

    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs && ret == 0;
         v = chain_next_used(chain, v + 1)) {
        struct slab_map *slab = &map->slabs[v];
        unsigned pieces;

        slab->faults = slab->recent = slab->grown = 0;
        slab_set_queued(slab, false);
        slab->run_end = slab->run = 0;
        if (layout_is_as_noted(map, lists, v))
            continue;
        pieces = layout_count_pieces(map, v);
        if (policy_is_too_much(pieces, vmas_used(map), 0, map->vma_budget)) {
            ret = layout_map_nothing(map, v);
            continue;
        }
        ret = piece_add_slab(map, v, &piece);
        layout_remember(map, v, SLAB_MAPPED, pieces);
    }
    return ret ? ret : piece_map(map, &piece);
}
