/* SPDX-License-Identifier: BSD-3-Clause */
/* Maps of engine "guard", and slabs of theirs that have guards. */
#ifndef PCOW_TEST_GUARDED_H
#define PCOW_TEST_GUARDED_H

#include "support.h"

#include <unistd.h>

#include "monitor/monitor.h"

#define CLUSTER (64 * KIB)
#define CLUSTERS (PCOW_SLAB_SIZE / CLUSTER)
#define SLABS 8u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define TRIES 1000u

/* NULL if this kernel has no guard regions for files: then the test is skipped. */
static inline pcow_map *map_with_budget(pcow_image *image, unsigned budget)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_GUARD, .full_policy = PCOW_FULL_FAIL, .vma_budget = budget};
    struct pcow_map_stats stats;
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    pcow_map_get_stats(map, &stats);
    if (stats.engine == PCOW_ENGINE_GUARD)
        return map;
    assert_int_equal(stats.engine, PCOW_ENGINE_SIGNAL);
    pcow_map_destroy(map);
    pcow_close(image);
    return NULL;
}

static inline pcow_map *map_guarded(pcow_image *image)
{
    return map_with_budget(image, 0);
}

static inline bool is_guarded(pcow_map *map, uint64_t slab)
{
    bool guarded;

    chain_claim(map->image->chain, slab);
    guarded = map->slabs[slab].guarded == GUARDED;
    chain_release(map->image->chain, slab);
    return guarded;
}

/* As if the guest had been seen to use a page or two of what a trap brings in: only then are there guards. */
static inline void be_sparse(pcow_map *map)
{
    __atomic_store_n(&map->density.dense, false, __ATOMIC_RELAXED);
}

/* Two stores, each to a cluster of its own, after which the thread puts guards up. */
static inline void begin_slab(pcow_map *map, uint64_t slab)
{
    unsigned char *memory = (unsigned char *)pcow_map_address(map) + slab * PCOW_SLAB_SIZE;

    be_sparse(map);
    memory[5 * CLUSTER + 3] = 1;
    memory[2 * CLUSTER + 3] = 1;
    for (unsigned i = 0; i < TRIES && !is_guarded(map, slab); i++)
        usleep(5000);
    assert_true(is_guarded(map, slab));
}

#endif
