/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the lists of the chain were before a revert: few of them change, and only those guest slabs
 * need other mappings.
 */
#include <stdlib.h>

#include "monitor/monitor.h"

/* The lists of the chain that there were, one after the other, by guest slab. */
struct layout_lists {
    slab_ref *ref;
    struct noted {
        uint64_t guest_slab;
        size_t start;                  /* in ref; its end is where the next one begins */
    } *noted;
    size_t count;
};

static slab_ref next_ref(const struct chain *chain, slab_ref ref)
{
    return chain->file[slab_ref_level(ref)]->slabs[slab_ref_slab(ref)].next;
}

void layout_forget_lists(struct layout_lists *lists)
{
    if (lists) {
        free(lists->ref);
        free(lists->noted);
    }
    free(lists);
}

struct layout_lists *layout_note_lists(const struct pcow_map *map)
{
    const struct chain *chain = map->image->chain;
    struct layout_lists *lists = calloc(1, sizeof *lists);
    size_t count = 0, slabs = 0;

    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs;
         v = chain_next_used(chain, v + 1), slabs++)
        for (slab_ref ref = chain->head[v]; ref; ref = next_ref(chain, ref))
            count++;
    if (!lists)
        return NULL;
    lists->ref = malloc((count + 1) * sizeof *lists->ref);
    lists->noted = malloc((slabs + 1) * sizeof *lists->noted);
    if (!lists->ref || !lists->noted) {
        layout_forget_lists(lists);
        return NULL;
    }
    count = 0;
    for (uint64_t v = chain_next_used(chain, 0); v < chain->guest_slabs && lists->count < slabs;
         v = chain_next_used(chain, v + 1)) {
        lists->noted[lists->count++] = (struct noted){v, count};
        for (slab_ref ref = chain->head[v]; ref; ref = next_ref(chain, ref))
            lists->ref[count++] = ref;
    }
    lists->noted[lists->count] = (struct noted){chain->guest_slabs, count};
    return lists;
}

static const struct noted *find_noted(const struct layout_lists *lists, uint64_t guest_slab)
{
    size_t low = 0, high = lists->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (lists->noted[middle].guest_slab < guest_slab)
            low = middle + 1;
        else
            high = middle;
    }
    return low < lists->count && lists->noted[low].guest_slab == guest_slab ? &lists->noted[low]
                                                                            : NULL;
}

/*
 * The same file slabs in the same order show the same places: nothing was own before, nor is now.
 */
bool layout_is_as_noted(const struct pcow_map *map, const struct layout_lists *lists,
                        uint64_t guest_slab)
{
    const struct chain *chain = map->image->chain;
    const struct noted *noted = find_noted(lists, guest_slab);
    size_t at = noted ? noted[0].start : 0, end = noted ? noted[1].start : 0;
    slab_ref ref = chain->head[guest_slab];

    while (ref && at < end && lists->ref[at] == ref) {
        ref = next_ref(chain, ref);
        at++;
    }
    return !ref && at == end && page_set_empty(&map->slabs[guest_slab].writable)
           && !slab_is_watched(&map->slabs[guest_slab].status)
           && !slab_is_stale(&map->slabs[guest_slab].status);
}
