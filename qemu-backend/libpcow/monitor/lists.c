/* SPDX-License-Identifier: BSD-3-Clause */
/* What the lists of the chain were before a revert: few of them change, and only those guest slabs need other mappings. */
#include <stdlib.h>

#include "monitor/monitor.h"

/* The lists of the chain as they were, one after the other: of guest slab v those from start[v] to start[v + 1]. */
struct layout_lists {
    slab_ref *ref;
    size_t *start;
};

static slab_ref next_ref(const struct chain *chain, slab_ref ref)
{
    return chain->file[slab_ref_level(ref)]->slabs[slab_ref_slab(ref)].next;
}

void layout_forget_lists(struct layout_lists *lists)
{
    if (lists) {
        free(lists->ref);
        free(lists->start);
    }
    free(lists);
}

struct layout_lists *layout_note_lists(const struct pcow_map *map)
{
    const struct chain *chain = map->image->chain;
    struct layout_lists *lists = calloc(1, sizeof *lists);
    size_t count = 0;

    for (uint64_t v = 0; v < chain->guest_slabs; v++)
        for (slab_ref ref = chain->head[v]; ref; ref = next_ref(chain, ref))
            count++;
    if (!lists)
        return NULL;
    lists->ref = malloc((count + 1) * sizeof *lists->ref);
    lists->start = malloc((chain->guest_slabs + 1) * sizeof *lists->start);
    if (!lists->ref || !lists->start) {
        layout_forget_lists(lists);
        return NULL;
    }
    count = 0;
    for (uint64_t v = 0; v < chain->guest_slabs; v++) {
        lists->start[v] = count;
        for (slab_ref ref = chain->head[v]; ref; ref = next_ref(chain, ref))
            lists->ref[count++] = ref;
    }
    lists->start[chain->guest_slabs] = count;
    return lists;
}

/* The same file slabs in the same order show the same places: nothing was own before, nor is now. */
bool layout_is_as_noted(const struct pcow_map *map, const struct layout_lists *lists, uint64_t guest_slab)
{
    const struct chain *chain = map->image->chain;
    size_t at = lists->start[guest_slab], end = lists->start[guest_slab + 1];
    slab_ref ref = chain->head[guest_slab];

    while (ref && at < end && lists->ref[at] == ref) {
        ref = next_ref(chain, ref);
        at++;
    }
    return !ref && at == end && page_set_empty(&map->slabs[guest_slab].writable) && !map->slabs[guest_slab].watched
        && !map->slabs[guest_slab].behind;
}
