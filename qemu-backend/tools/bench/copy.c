/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Copy-on-write: stores to memory that a base image holds. The monitor copies one page at the first
 * trap in a cluster and the rest of it at the second; the cluster size decides whether that is 64
 * KiB or 2 MiB. cow-4k is the first trap in a slab, for which nothing could be done ahead but to
 * prepare slabs; cow-4k-scattered a page in each cluster of all slabs.
 */
#include "trap.h"

static const struct trap_row rows[] = {
    {.name = "cow-4k",
     .visit = VISIT_ONE_PER_SLAB,
     .on_base = true,
     .cluster_size = PCOW_DEFAULT_CLUSTER_SIZE,
     .paper_cluster_size = PCOW_DEFAULT_CLUSTER_SIZE,
     .paper_fine_grained = true,
     .bare = true,
     .copied = PCOW_PAGE_SIZE,
     .at_most_raw = {7, 7},
     .at_most_limit = 4.5,
     .at_most_p99_us = ONE_PAGE_P99_US},
    {.name = "cow-4k-scattered",
     .visit = VISIT_ONE_PER_CLUSTER,
     .on_base = true,
     .cluster_size = PCOW_DEFAULT_CLUSTER_SIZE,
     .paper_cluster_size = PCOW_DEFAULT_CLUSTER_SIZE,
     .paper_fine_grained = true,
     .bare = true,
     .copied = PCOW_PAGE_SIZE,
     .at_most_raw = {7, 7},
     .at_most_limit = 4.5,
     .at_most_p99_us = ONE_PAGE_P99_US},
    {.name = "cow-64k",
     .visit = VISIT_SECOND_IN_CLUSTER,
     .on_base = true,
     .cluster_size = PCOW_DEFAULT_CLUSTER_SIZE,
     .paper_cluster_size = PCOW_DEFAULT_CLUSTER_SIZE,
     .bare = true,
     .copied = PCOW_DEFAULT_CLUSTER_SIZE,
     .at_most_limit = 2.5},
    {.name = "cow-2m",
     .visit = VISIT_SECOND_IN_CLUSTER,
     .on_base = true,
     .cluster_size = PCOW_SLAB_SIZE,
     .paper_cluster_size = PCOW_SLAB_SIZE,
     .copied = PCOW_SLAB_SIZE,
     .at_most_limit = 1.1},
};

static const char *const names[] = {"cow-4k", "cow-4k-scattered", "cow-64k", "cow-2m", NULL};

static int run(struct bench *bench, struct pcow_error *error)
{
    int r = 0;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]) && !r; i++) {
        r = bench_wants(bench, rows[i].name) ? measure_trap_row(bench, &rows[i], error) : 0;
    }
    return r;
}

const struct group copy_group = {names, run};
