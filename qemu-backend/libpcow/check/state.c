/* SPDX-License-Identifier: BSD-3-Clause */
/* VM state of snapshots: it is whole, or it is given up. */
#include "check/check.h"

#include <stdlib.h>

/* The slab that holds this piece; 0: there is none. */
static uint64_t find_piece(struct check_slab *const *sorted, size_t count, uint64_t number)
{
    size_t low = 0, high = count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (sorted[middle]->owner.number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && sorted[low]->owner.number == number ? sorted[low]->slab : 0;
}

/* Are all pieces there, and the last one up to its end? */
static bool state_is_whole(const struct check *check, uint64_t size,
                           struct check_slab *const *sorted, size_t count)
{
    for (uint64_t offset = 0; offset < size; offset += PCOW_SLAB_SIZE) {
        uint64_t slab = find_piece(sorted, count, offset >> SLAB_BITS), rest = size - offset;

        if (!slab
            || (slab << SLAB_BITS) + (rest < PCOW_SLAB_SIZE ? rest : PCOW_SLAB_SIZE)
                   > check->length)
            return false;
    }
    return true;
}

static int give_state_up(struct check *check, struct check_layer *found,
                         struct check_slab *const *sorted, size_t count, uint64_t needed)
{
    uint64_t next = 0;
    int ret = 0;

    check_corruption(check, true,
                     "the VM state of snapshot '%s' is not whole and is given up; its memory "
                     "can still be used",
                     found->layer.name);
    /* What is missing between two pieces is one loss: its length is only what a record says. */
    for (size_t i = 0; i < count && sorted[i]->owner.number < needed && ret == 0; i++) {
        uint64_t number = sorted[i]->owner.number;

        /* There a second time: the first counts. */
        if (number < next)
            continue;
        if (number > next)
            ret = check_lose_state(check, found, next, number, 0);
        next = number + 1;
        if (!ret)
            ret = check_lose_state(check, found, number, next, sorted[i]->slab);
    }
    if (next < needed && ret == 0)
        ret = check_lose_state(check, found, next, needed, 0);
    found->layer.state_size = 0;
    return ret ? ret
               : check_store64(check,
                               check_record_offset(check, found->layer.slot)
                                   + offsetof(struct layer_record, state_size),
                               0);
}

/* The pieces of one layer, by number. */
static int check_pieces(struct check *check, struct check_layer *found,
                        struct check_slab *const *sorted, size_t count)
{
    uint64_t needed = (found->layer.state_size + PCOW_SLAB_SIZE - 1) >> SLAB_BITS,
             previous = UINT64_MAX;
    int ret = 0;

    if (found->layer.state != LAYER_SNAPSHOT)
        needed = 0;
    if (needed && !state_is_whole(check, found->layer.state_size, sorted, count)) {
        ret = give_state_up(check, found, sorted, count, needed);
        needed = 0;
    }
    for (size_t i = 0; i < count && ret == 0; i++) {
        struct check_slab *slab = sorted[i];

        if (slab->owner.number >= needed) {
            check_leak(check, "file slab %llu holds VM state of layer %u behind its end",
                       (unsigned long long)slab->slab, found->layer.id);
            ret = check_drop_slab(check, slab, NULL);
        } else if (slab->owner.number == previous && !check_is_amending(check)) {
            check_corruption(check, true,
                             "file slab %llu holds a piece of the VM state of snapshot '%s' for "
                             "the second time; "
                             "the first counts",
                             (unsigned long long)slab->slab, found->layer.name);
            ret = check_drop_slab(check, slab, NULL);
        } else {
            previous = slab->owner.number;
        }
    }
    return ret;
}

int check_state(struct check *check)
{
    struct check_slab **sorted;
    size_t count, at = 0;
    int ret = check_sort_by_owner(check, OWNER_STATE, &sorted, &count);

    /* Both lists are in order of layers. Slabs of dead layers are gone by now. */
    for (size_t i = 0; i < check->layer_count && ret == 0; i++) {
        size_t first = at;

        if (!check->layers[i].alive)
            continue;
        while (at < count && sorted[at]->owner.layer == check->layers[i].layer.id)
            at++;
        ret = check_pieces(check, &check->layers[i], sorted + first, at - first);
    }
    free(sorted);
    return ret;
}
