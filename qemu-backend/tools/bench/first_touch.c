/* SPDX-License-Identifier: BSD-3-Clause */
/* First touch: stores to memory that no layer of the chain holds (expansion). */
#include "trap.h"

#define CLUSTER PCOW_DEFAULT_CLUSTER_SIZE

static const struct trap_row rows[] = {
    {.name = "first-touch-single",
     .visit = VISIT_ONE_PER_CLUSTER,
     .cluster_size = CLUSTER,
     .paper_cluster_size = CLUSTER,
     .bare = true,
     .at_most_raw = {4, 5},
     .at_most_p99_us = ONE_PAGE_P99_US},
    {.name = "first-touch-sequential",
     .visit = VISIT_SEQUENTIAL,
     .cluster_size = CLUSTER,
     .paper_cluster_size = CLUSTER,
     .amortised = true,
     .at_most_raw = {0.5, 0.5}},
    {.name = "first-touch-clustered",
     .visit = VISIT_CLUSTERED,
     .cluster_size = CLUSTER,
     .paper_cluster_size = CLUSTER,
     .amortised = true,
     .at_most_raw = {0.5, 0.5}},
};

static const char *const names[] = {"first-touch-single", "first-touch-sequential",
                                    "first-touch-clustered", NULL};

static int run(struct bench *bench, struct pcow_error *error)
{
    int r = 0;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]) && !r; i++) {
        r = bench_wants(bench, rows[i].name) ? measure_trap_row(bench, &rows[i], error) : 0;
    }
    return r;
}

const struct group first_touch_group = {names, run};
