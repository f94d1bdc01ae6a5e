/* SPDX-License-Identifier: BSD-3-Clause */
/* Maps of engine "minor", and slabs of theirs in which stores are scattered. */
#ifndef PCOW_TEST_SCATTERED_H
#define PCOW_TEST_SCATTERED_H

#include "support.h"

#include <unistd.h>

#include "monitor/monitor.h"

#define CLUSTER (64 * KIB)
#define CLUSTERS (PCOW_SLAB_SIZE / CLUSTER)
#define SLABS 8u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define BASE 0x5a                      /* each byte of a base */

static inline void must_hold(pcow_image *image, uint64_t offset, unsigned char expected)
{
    unsigned char byte;

    MUST(pcow_read(image, offset, &byte, 1, &error));
    assert_int_equal(byte, expected);
}

/* NULL if this kernel has no such userfaultfd: then the test is skipped. */
static inline pcow_map *map_with_budget(pcow_image *image, unsigned budget)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_MINOR,
                                       .full_policy = PCOW_FULL_FAIL,
                                       .vma_budget = budget,
                                       .serves_sigbus = serve_bus()};
    struct pcow_map_stats stats;
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    pcow_map_get_stats(map, &stats);
    if (stats.engine == PCOW_ENGINE_MINOR)
        return map;
    assert_int_equal(stats.engine, PCOW_ENGINE_SIGNAL);
    pcow_map_destroy(map);
    pcow_close(image);
    return NULL;
}

static inline pcow_map *map_minor(pcow_image *image)
{
    return map_with_budget(image, 0);
}

static inline bool is_minor(pcow_map *map, uint64_t slab)
{
    bool minor;

    chain_claim(map->image->chain, slab);
    minor = slab_state(&map->slabs[slab].status) == SLAB_MINOR;
    chain_release(map->image->chain, slab);
    return minor;
}

/*
 * As if the guest had been seen to use a page or two of what a trap brings in: only then is absent
 * memory let in page by page.
 */
static inline void be_sparse(pcow_map *map)
{
    __atomic_store_n(&map->density.dense, false, __ATOMIC_RELAXED);
}

/* Two stores, each to a cluster of its own, of which the second puts the slab into minor mode. */
static inline void begin_slab(pcow_map *map, uint64_t slab)
{
    unsigned char *memory = (unsigned char *)pcow_map_address(map) + slab * PCOW_SLAB_SIZE;

    be_sparse(map);
    memory[5 * CLUSTER + 3] = 1;
    memory[2 * CLUSTER + 3] = 1;
    assert_true(is_minor(map, slab));
}

#endif
