/* SPDX-License-Identifier: BSD-3-Clause */
/* What is known of one slab of the range, without a look at how it is mapped. */
#include "monitor/monitor.h"

unsigned layout_pages(const struct pcow_map *map, uint64_t guest_slab)
{
    uint64_t left = (map->size - (guest_slab << SLAB_BITS)) / PCOW_PAGE_SIZE;

    return left < PAGES_PER_SLAB ? (unsigned)left : PAGES_PER_SLAB;
}

unsigned layout_count_pieces(const struct pcow_map *map, uint64_t guest_slab)
{
    return chain_count_pieces(map->image, guest_slab, layout_pages(map, guest_slab));
}

void layout_enter(struct pcow_map *map, uint64_t guest_slab, enum slab_state state)
{
    struct slab_status *status = &map->slabs[guest_slab].status;
    enum slab_state from = slab_state(status);

    slab_enter(status, state);
    __atomic_fetch_add(&map->bounced, (uint64_t)(state == SLAB_BOUNCE) - (from == SLAB_BOUNCE),
                       __ATOMIC_RELAXED);
}

unsigned layout_cluster(const struct pcow_map *map)
{
    return 1u << (map->image->header.cluster_bits - 12);
}

bool slab_was_asked(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_map *slab = &map->slabs[guest_slab];

    return !map->engine->must_be_asked
           || (__atomic_load_n(&slab->asked, __ATOMIC_SEQ_CST) && !slab_is_kept(&slab->status));
}

bool slab_ask(struct pcow_map *map, uint64_t guest_slab)
{
    struct slab_map *slab = &map->slabs[guest_slab];

    if (!map->engine->must_be_asked)
        return true;
    if (!__atomic_load_n(&slab->asked, __ATOMIC_RELAXED))
        __atomic_store_n(&slab->asked, 1, __ATOMIC_SEQ_CST);
    return !slab_is_kept(&slab->status);
}
