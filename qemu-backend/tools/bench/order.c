/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>

#include "sides.h"
#include "trap.h"

#define PAGES_PER_SLAB (PCOW_SLAB_SIZE / PCOW_PAGE_SIZE)
#define HOT_CLUSTER_PAGES (PCOW_DEFAULT_CLUSTER_SIZE / PCOW_PAGE_SIZE)

/* count units in random order. */
static uint64_t *permutation(uint64_t count, uint64_t *seed)
{
    uint64_t *order = malloc((count ? count : 1) * sizeof(*order));

    for (uint64_t i = 0; order && i < count; i++) {
        order[i] = i;
    }
    if (order) {
        shuffle(order, count, seed);
    }
    return order;
}

static int random_page_of_each(struct visits *visits, uint64_t units, uint64_t pages_per_unit,
                               uint64_t first, uint64_t *seed)
{
    visits->page = permutation(units, seed);
    visits->count = units;
    for (uint64_t i = 0; visits->page && i < units; i++) {
        visits->page[i] =
            visits->page[i] * pages_per_unit + first + random_next(seed) % (pages_per_unit - first);
    }
    return visits->page ? 0 : -ENOMEM;
}

static int every_page(struct visits *visits, uint64_t units, uint64_t pages_per_unit, bool in_order,
                      uint64_t *seed)
{
    uint64_t *order = permutation(units, seed);

    visits->count = units * pages_per_unit;
    visits->page = malloc(visits->count * sizeof(*visits->page));
    for (size_t i = 0; order && visits->page && i < visits->count; i++) {
        visits->page[i] =
            in_order ? i : order[i / pages_per_unit] * pages_per_unit + i % pages_per_unit;
    }
    free(order);
    return order && visits->page ? 0 : -ENOMEM;
}

static int warm_slabs(struct visits *visits, uint64_t slabs)
{
    visits->warm = malloc(slabs * sizeof(*visits->warm));
    for (visits->warm_count = 0; visits->warm && visits->warm_count < slabs; visits->warm_count++) {
        visits->warm[visits->warm_count] = visits->warm_count * PAGES_PER_SLAB;
    }
    return visits->warm ? 0 : -ENOMEM;
}

/*
 * In each slab: a store to the first page of some cluster, which is not timed, and one to another
 * page of it.
 */
static int second_of_a_cluster(struct visits *visits, uint64_t slabs, uint64_t cluster_pages,
                               uint64_t *seed)
{
    visits->page = permutation(slabs, seed);
    visits->count = slabs;
    visits->warm_stores = true;
    if (!visits->page || warm_slabs(visits, slabs)) {
        return -ENOMEM;
    }
    for (uint64_t i = 0; i < slabs; i++) {
        uint64_t slab = visits->page[i],
                 cluster = slab * PAGES_PER_SLAB
                           + random_next(seed) % (PAGES_PER_SLAB / cluster_pages) * cluster_pages;

        visits->warm[slab] = cluster;
        visits->page[i] = cluster + 1 + random_next(seed) % (cluster_pages - 1);
    }
    return 0;
}

int visits_make(struct visits *visits, enum visit visit, uint64_t size, uint64_t cluster_size,
                uint64_t seed)
{
    uint64_t cluster_pages = cluster_size / PCOW_PAGE_SIZE, clusters = size / cluster_size,
             slabs = size / PCOW_SLAB_SIZE;

    *visits = (struct visits){0};
    switch (visit) {
    case VISIT_ONE_PER_CLUSTER:
        return random_page_of_each(visits, clusters, cluster_pages, 0, &seed);
    case VISIT_SEQUENTIAL:
        return every_page(visits, clusters, cluster_pages, true, &seed);
    case VISIT_CLUSTERED:
        return every_page(visits, clusters, cluster_pages, false, &seed);
    case VISIT_ONE_PER_SLAB:
        /* A load of another page warms the slab. */
        return random_page_of_each(visits, slabs, PAGES_PER_SLAB, HOT_CLUSTER_PAGES, &seed)
                       || warm_slabs(visits, slabs)
                   ? -ENOMEM
                   : 0;
    case VISIT_SECOND_IN_CLUSTER:
        return second_of_a_cluster(visits, slabs, cluster_pages, &seed);
    }
    return -EINVAL;
}

void visits_free(struct visits *visits)
{
    free(visits->page);
    free(visits->warm);
    *visits = (struct visits){0};
}
