/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Rows about stores that trap: what differs between them is a table, how they are measured is the
 * same.
 */
#ifndef BENCH_TRAP_H
#define BENCH_TRAP_H

#include "bench.h"

/* the first touch of a page, or its copy, in 99 of 100 */
#define ONE_PAGE_P99_US 20

/* Which pages are stored to, and in which order. */
enum visit {
    /* a page of each cluster, clusters in random order: each store traps */
    VISIT_ONE_PER_CLUSTER,
    VISIT_SEQUENTIAL, /* every page */
    VISIT_CLUSTERED, /* every page, clusters in random order */
    /*
     * a page of each slab, in random order, after a load elsewhere in the slab has made its page
     * table: the first trap in the slab
     */
    VISIT_ONE_PER_SLAB,
    /* a page of each slab after a store to another one of its cluster: the rest of it follows */
    VISIT_SECOND_IN_CLUSTER,
};

struct trap_row {
    const char *name;
    enum visit visit;
    /* copy-on-write from a base; else memory that no layer holds */
    bool on_base;
    uint64_t cluster_size;                     /* of the pcow image */
    uint64_t paper_cluster_size;
    bool paper_fine_grained;
    /* mean over all stores instead of the median of those that trap */
    bool amortised;
    bool bare;                                 /* bare traps are measured as well, see bare.h */
    uint64_t copied;                           /* bytes that one trap copies; part of the limit */
    double at_most_raw[MAX_THREADS];           /* pcow/raw by threads - 1; 0: no target */
    double at_most_limit;                      /* pcow/limit; 0: no target */
    double at_most_p99_us;                     /* of pcow; 0: no target */
};

int measure_trap_row(struct bench *bench, const struct trap_row *row, struct pcow_error *error);

struct visits {
    uint64_t *page;                            /* timed, in order */
    size_t count;
    uint64_t *warm;                            /* before, not timed */
    size_t warm_count;
    bool warm_stores;                          /* else loads */
};

/* order.c */
int visits_make(struct visits *visits, enum visit visit, uint64_t size, uint64_t cluster_size,
                uint64_t seed);
void visits_free(struct visits *visits);

#endif
