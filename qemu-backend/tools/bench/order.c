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

static int random_page_of_each(struct visits *visits, uint64_t units, uint64_t pages_per_unit, uint64_t first, uint64_t *seed)
{
    visits->page = permutation(units, seed);
    visits->count = units;
    for (uint64_t i = 0; visits->page && i < units; i++) {
        visits->page[i] = visits->page[i] * pages_per_unit + first + random_next(seed) % (pages_per_unit - first);
    }
    return visits->page ? 0 : -ENOMEM;
}

static int every_page(struct visits *visits, uint64_t units, uint64_t pages_per_unit, bool in_order, uint64_t *seed)
{
    uint64_t *order = permutation(units, seed);

    visits->count = units * pages_per_unit;
    visits->page = malloc(visits->count * sizeof(*visits->page));
    for (size_t i = 0; order && visits->page && i < visits->count; i++) {
        visits->page[i] = in_order ? i : order[i / pages_per_unit] * pages_per_unit + i % pages_per_unit;
    }
    free(order);
    return order && visits->page ? 0 : -ENOMEM;
}

int visits_make(struct visits *visits, enum visit visit, uint64_t size, uint64_t cluster_size, uint64_t seed)
{
    uint64_t cluster_pages = cluster_size / PCOW_PAGE_SIZE, clusters = size / cluster_size, slabs = size / PCOW_SLAB_SIZE;

    *visits = (struct visits){0};
    switch (visit) {
    case VISIT_ONE_PER_CLUSTER:
        return random_page_of_each(visits, clusters, cluster_pages, 0, &seed);
    case VISIT_SEQUENTIAL:
        return every_page(visits, clusters, cluster_pages, true, &seed);
    case VISIT_CLUSTERED:
        return every_page(visits, clusters, cluster_pages, false, &seed);
    case VISIT_ONE_PER_SLAB:
    case VISIT_SECOND_IN_SLAB:
        /* The first page warms the slab; the timed store goes to another cluster. */
        visits->warm_stores = visit == VISIT_SECOND_IN_SLAB;
        visits->warm = malloc(slabs * sizeof(*visits->warm));
        for (visits->warm_count = 0; visits->warm && visits->warm_count < slabs; visits->warm_count++) {
            visits->warm[visits->warm_count] = visits->warm_count * PAGES_PER_SLAB;
        }
        return visits->warm ? random_page_of_each(visits, slabs, PAGES_PER_SLAB, HOT_CLUSTER_PAGES, &seed) : -ENOMEM;
    }
    return -EINVAL;
}

void visits_free(struct visits *visits)
{
    free(visits->page);
    free(visits->warm);
    *visits = (struct visits){0};
}
