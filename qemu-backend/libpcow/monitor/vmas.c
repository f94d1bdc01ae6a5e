/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How many mappings there are, of a map and of all maps of the process: the kernel's limit is that
 * of the process.
 */
#include "monitor/monitor.h"
#include "monitor/policy.h"

static unsigned of_all_maps;           /* relaxed atomic */

void vmas_add(struct pcow_map *map, int change)
{
    __atomic_add_fetch(&map->vmas, (unsigned)change, __ATOMIC_RELAXED);
    __atomic_add_fetch(&of_all_maps, (unsigned)change, __ATOMIC_RELAXED);
}

static uint64_t stretches(uint64_t used, uint64_t slabs)
{
    return used + 1 < slabs - used ? used + 1 : slabs - used;
}

void vmas_begin(struct pcow_map *map, struct slab_map *slab)
{
    uint64_t slabs = map->image->chain->guest_slabs, used;

    if (slab->counted)
        return;
    slab->counted = 1;
    used = __atomic_fetch_add(&map->slabs_counted, 1, __ATOMIC_RELAXED);
    vmas_add(map, (int)((int64_t)stretches(used + 1, slabs) - (int64_t)stretches(used, slabs)));
}

unsigned vmas_used(const struct pcow_map *map)
{
    return __atomic_load_n(map->shares_vmas ? &of_all_maps : &map->vmas, __ATOMIC_RELAXED);
}

bool vmas_are_short(const struct pcow_map *map)
{
    return policy_is_short(vmas_used(map), map->vma_budget);
}

void vmas_forget_all(void)
{
    __atomic_store_n(&of_all_maps, 0, __ATOMIC_RELAXED);
}
