/* SPDX-License-Identifier: BSD-3-Clause */
/* One slab: mapped as the chain has it, or not at all. */
#include <string.h>

#include "monitor/layout.h"
#include "monitor/monitor.h"

void layout_set_pieces(struct pcow_map *map, struct slab_map *slab, unsigned pieces)
{
    vmas_begin(map, slab);
    vmas_add(map, (int)pieces - (int)slab->pieces);
    slab->pieces = (uint16_t)pieces;
}

void layout_recount(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    unsigned pieces;

    if (slab_is_unmapped(&slab->status) || slab->pieces <= 1)
        return;
    pieces = layout_count_pieces(map, guest_slab) + slab->holes;
    layout_set_pieces(map, slab, pieces < PAGES_PER_SLAB ? pieces : PAGES_PER_SLAB);
}

/*
 * Whoever relies on pages that were mapped for stores (a kernel that asked once) has to ask again.
 * That is told once for all slabs, of which a revert has many: who finds it noted finds that it is
 * being told, too, see pcow_map_next_event().
 */
void layout_withdraw(struct pcow_map *map)
{
    if (!__atomic_exchange_n(&map->withdrawn, true, __ATOMIC_SEQ_CST))
        events_wake(&map->events);
}

/* It is mapped as the chain has it, or (UNMAPPED) not at all. */
void layout_remember(struct pcow_map *map, uint64_t guest_slab, enum slab_state state,
                     unsigned pieces)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    struct page_set own = {{0}};
    bool withdrawn = false;

    slab->holes = 0;
    slab->refused = 0;
    layout_set_pieces(map, slab, pieces);
    slab_refresh(&slab->status);
    layout_enter(map, guest_slab, state);
    if (state == SLAB_MAPPED && map->image->file.writable
        && map->image->view == image_active(map->image))
        chain_own_backed(map->image, guest_slab, &own);
    lost_take_out(map, guest_slab, &own);
    /* Looked at without the claim, so no page may disappear from it for a moment. */
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++) {
        /*
         * Stored to, and now mapped for loads: a page that was backed alone, in a slab of which
         * others are not.
         */
        if (slab->writable.word[w] & ~own.word[w]) {
            image_note_stores(map->image);
            withdrawn = true;
        }
        __atomic_store_n(&slab->writable.word[w], own.word[w], __ATOMIC_RELEASE);
    }
    if (withdrawn)
        layout_withdraw(map);
}

int layout_map_slab(struct pcow_map *map, uint64_t guest_slab)
{
    struct piece piece = {0};
    int ret = slab_leave(map, guest_slab);

    if (ret)
        return ret;
    ret = piece_add_slab(map, guest_slab, &piece);
    if (!ret)
        ret = piece_map(map, &piece);
    if (!ret)
        layout_remember(map, guest_slab, SLAB_MAPPED, layout_count_pieces(map, guest_slab));
    else
        /* What is half mapped would trap for ever, or be believed to be there. */
        layout_unmap_slab(map, guest_slab);
    return ret;
}

static int unmap(struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t from = guest_slab << SLAB_BITS;

    return reserve_again(map, from, from + layout_pages(map, guest_slab) * PCOW_PAGE_SIZE);
}

void layout_unmap_slab(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    bool unmapped;

    slab->refused = 1;
    /*
     * Who has a system call load from it looks at this without the claim. Who asks for a slab that
     * is kept relies on writable, too, once it is not: so that one comes last.
     */
    if (slab_can_be_loaded_from(&slab->status))
        layout_enter(map, guest_slab, SLAB_UNMAPPED);
    /*
     * A flush that is under way may ask for pages at which nothing is mapped any more, and must not
     * believe the answer.
     */
    if (!page_set_empty(&slab->writable))
        image_note_stores(map->image);
    /*
     * At the limit of mappings this one may fail as well. Then any page may be mapped as it was
     * before, for stores too, or not at all: a trap must map it anew, and nothing may rely on what
     * is written here.
     */
    unmapped = unmap(map, guest_slab) == 0;
    if (unmapped)
        layout_set_pieces(map, slab, 1);
    else
        __atomic_store_n(&map->unknown, true, __ATOMIC_SEQ_CST);
    /* The next one finds what was stored to until now by these sets. */
    if (!page_set_empty(&slab->writable)) {
        image_note_stores(map->image);
        layout_withdraw(map);
    }
    memset(&slab->writable, 0, sizeof slab->writable);
    layout_enter(map, guest_slab, unmapped ? SLAB_UNMAPPED : SLAB_UNKNOWN);
    if (unmapped)
        slab_refresh(&slab->status);
    else
        slab_lose_track(&slab->status);
}

int layout_catch_up(struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_status *status = &map->slabs[guest_slab].status;
    int ret = slab_is_stale(status) ? layout_map_slab(map, guest_slab) : 0;

    /* If it fails the slab is unmapped, or nobody knows what is mapped. */
    return slab_is_stale(status) ? ret : 0;
}

/*
 * Nothing is mapped; the first access, load or store, brings the whole slab into the active layer
 * as one piece, or into memory, see bounce.c.
 */
int layout_map_nothing(struct pcow_map *map, uint64_t guest_slab)
{
    layout_remember(map, guest_slab, SLAB_UNMAPPED, 1);
    return unmap(map, guest_slab);
}
