/* SPDX-License-Identifier: BSD-3-Clause */
/* Which layers are alive, and what can be put in the place of damaged fields of their records. */
#include "check/check.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/error.h"

static void mark_alive(struct check *check)
{
    uint32_t active = (uint32_t)word_value(check->header.active_layer);
    const struct check_layer *top = check_find_layer(check, active);
    uint32_t parent = top ? top->layer.parent : 0;

    for (size_t i = 0; i < check->layer_count; i++) {
        struct check_layer *found = &check->layers[i];

        found->alive = found->layer.state == LAYER_SNAPSHOT || found->layer.state == LAYER_HIDDEN
                       || (found->layer.state == LAYER_OPEN
                           && (found->layer.id == active || found->layer.id == parent));
        found->doubtful = !found->alive && found->layer.state == LAYER_OPEN && top
                          && top->damage & DAMAGED_PARENT;
        if (found->alive && found->layer.state == LAYER_OPEN && found->layer.id != active) {
            check_note(check,
                       "taking snapshot '%s' was interrupted before all of it was on the medium; "
                       "the next writer removes it",
                       found->damage & DAMAGED_NAME ? "?" : found->layer.name);
            found->layer.state = LAYER_HIDDEN;
            found->rewrite |= check->repair;
        }
    }
}

/* An open layer that is dead counts for nothing, but open() wants its record readable. */
static int free_damaged(struct check *check, struct check_layer *found)
{
    if (found->layer.state != LAYER_OPEN || !(found->damage & DAMAGED_ALL & ~DAMAGED_NAME))
        return 0;
    check_corruption(check, true,
                     "the record of layer %u, which an interrupted operation left, is damaged",
                     found->layer.id);
    found->layer =
        (struct layer){.id = found->layer.id, .slot = found->layer.slot, .state = LAYER_FREE};
    return check_write_record(check, &found->layer);
}

/* ---- parents --------------------------------------------------------------------------------- */

/*
 * A layer that lost its parent: if exactly one older layer has no child, it stands on that one (a
 * row of snapshots); else only the base shows below it.
 */
static int settle_parents(struct check *check)
{
    bool *has_child = calloc(check->layer_count + 1, sizeof *has_child);
    size_t childless = 0, sum = 0;

    if (!has_child)
        return error_set(check->error, -ENOMEM, "out of memory");
    for (size_t i = 0; i < check->layer_count; i++) {
        const struct check_layer *found = &check->layers[i];
        const struct check_layer *parent = found->alive && found->layer.parent
                                               ? check_find_layer(check, found->layer.parent)
                                               : NULL;

        if (parent)
            has_child[parent - check->layers] = true;
    }
    for (size_t i = 0; i < check->layer_count; i++) {
        struct check_layer *found = &check->layers[i];

        if (!found->alive)
            continue;
        if (found->damage & DAMAGED_PARENT) {
            check->parents_lost = true;
            if (childless == 1) {
                found->layer.parent = check->layers[sum].layer.id;
                childless = sum = 0;
            }
            if (found->layer.parent)
                check_corruption(
                    check, true,
                    "layer %u has lost its parent; in the row of snapshots it was layer %u",
                    found->layer.id, found->layer.parent);
            else
                check_corruption(
                    check, true,
                    "layer %u has lost its parent; it stands on %s now, compare it with a backup",
                    found->layer.id, word_value(check->header.base_slot) ? "the base" : "nothing");
            found->rewrite = true;
        }
        /* Nothing stands on the active layer. */
        if (!has_child[i] && found->layer.id != word_value(check->header.active_layer)) {
            childless++;
            sum += i;
        }
    }
    free(has_child);
    return 0;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

/* Of each layer, where its data and its VM state end, by the slabs that it owns. */
static void find_ends(struct check *check)
{
    for (size_t i = 0; i < check->count; i++) {
        const struct owner *owner = &check->slabs[i].owner;
        struct check_layer *found = check_find_layer(check, owner->layer);
        uint64_t end = (owner->number + UINT64_C(1)) << SLAB_BITS;

        if (found && owner->kind == OWNER_DATA && end > found->data_end)
            found->data_end = end;
        if (found && owner->kind == OWNER_STATE && end > found->state_end)
            found->state_end = end;
    }
}

static uint64_t largest_size(const struct check *check)
{
    uint64_t largest = PCOW_SLAB_SIZE;

    for (size_t i = 0; i < check->layer_count; i++) {
        const struct check_layer *found = &check->layers[i];

        if (found->alive && found->layer.virtual_size > largest)
            largest = found->layer.virtual_size;
        if (found->alive && found->data_end > largest)
            largest = found->data_end;
    }
    return largest;
}

static void settle_sizes(struct check *check, struct check_layer *found, uint64_t largest)
{
    const struct check_layer *parent =
        found->layer.parent ? check_find_layer(check, found->layer.parent) : NULL;

    if (found->damage & DAMAGED_SIZE) {
        /* With nothing below it, any other layer is the best hint. */
        found->layer.virtual_size = parent ? parent->layer.virtual_size : largest;
        if (found->layer.virtual_size < found->data_end)
            found->layer.virtual_size = found->data_end;
        check_corruption(
            check, true,
            "layer %u has lost its virtual size; by its data and its neighbours it is %llu bytes, "
            "use pcow-img resize if it was another",
            found->layer.id, (unsigned long long)found->layer.virtual_size);
        found->rewrite = true;
    }
    if (found->damage & DAMAGED_LIMIT) {
        found->layer.parent_limit = found->layer.virtual_size;
        if (parent && parent->layer.virtual_size < found->layer.parent_limit)
            found->layer.parent_limit = parent->layer.virtual_size;
        check_corruption(check, true,
                         "layer %u has lost its parent_limit; %llu is taken, which is right unless "
                         "the image was resized",
                         found->layer.id, (unsigned long long)found->layer.parent_limit);
        found->rewrite = true;
    }
    if (found->damage & DAMAGED_STATE_SIZE) {
        found->layer.state_size = found->layer.state == LAYER_SNAPSHOT ? found->state_end : 0;
        check_corruption(check, true,
                         "layer %u has lost the length of its VM state; %llu bytes are kept",
                         found->layer.id, (unsigned long long)found->layer.state_size);
        found->rewrite = true;
    }
}

/* ---- names ----------------------------------------------------------------------------------- */

static int compare_names(const void *left, const void *right)
{
    const struct check_layer *a = *(const struct check_layer *const *)left,
                             *b = *(const struct check_layer *const *)right;
    int order = strcmp(a->layer.name, b->layer.name);

    return order ? order : a->layer.id < b->layer.id ? -1 : a->layer.id > b->layer.id;
}

static bool name_is_taken(struct check_layer *const *sorted, size_t count, const char *name)
{
    size_t low = 0, high = count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (strcmp(sorted[middle]->layer.name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && strcmp(sorted[low]->layer.name, name) == 0;
}

static void recovered_name(struct check_layer *const *sorted, size_t count,
                           const struct layer *layer, char name[PCOW_SNAPSHOT_NAME_SIZE])
{
    memset(name, 0, PCOW_SNAPSHOT_NAME_SIZE);
    snprintf(name, PCOW_SNAPSHOT_NAME_SIZE, "recovered-%u", layer->id);
    for (unsigned i = 2; name_is_taken(sorted, count, name); i++)
        snprintf(name, PCOW_SNAPSHOT_NAME_SIZE, "recovered-%u-%u", layer->id, i);
}

static int settle_names(struct check *check)
{
    struct check_layer **sorted = calloc(check->layer_count + 1, sizeof *sorted);
    char (*fresh)[PCOW_SNAPSHOT_NAME_SIZE] = calloc(check->layer_count + 1, sizeof *fresh);
    size_t count = 0;

    if (!sorted || !fresh) {
        free(sorted);
        free(fresh);
        return error_set(check->error, -ENOMEM, "out of memory");
    }
    for (size_t i = 0; i < check->layer_count; i++)
        if (check->layers[i].layer.state == LAYER_SNAPSHOT
            && !(check->layers[i].damage & DAMAGED_NAME))
            sorted[count++] = &check->layers[i];
    qsort(sorted, count, sizeof *sorted, compare_names);
    /*
     * The names stay as they are until all new ones are found, or the search above would not find
     * its way.
     */
    for (size_t i = 1; i < count; i++)
        if (strcmp(sorted[i]->layer.name, sorted[i - 1]->layer.name) == 0) {
            char *name = fresh[sorted[i] - check->layers];

            recovered_name(sorted, count, &sorted[i]->layer, name);
            check_corruption(
                check, true, "snapshots %u and %u have one name, '%s'; the second becomes '%s'",
                sorted[i - 1]->layer.id, sorted[i]->layer.id, sorted[i]->layer.name, name);
        }
    for (size_t i = 0; i < check->layer_count; i++) {
        struct check_layer *found = &check->layers[i];

        /* An open layer needs no name; for the others open() wants a whole description. */
        if (found->alive && found->damage & DAMAGED_NAME && found->layer.state != LAYER_OPEN) {
            recovered_name(sorted, count, &found->layer, fresh[i]);
            check_corruption(check, true, "the name of snapshot %u is damaged; it becomes '%s'",
                             found->layer.id, fresh[i]);
        }
        if (fresh[i][0]) {
            memcpy(found->layer.name, fresh[i], sizeof found->layer.name);
            found->rewrite = true;
        }
    }
    free(sorted);
    free(fresh);
    return 0;
}

/* ---- counters, and writing what has changed -------------------------------------------------- */

static int settle_counters(struct check *check)
{
    uint64_t next = word_value(check->header.next_layer_id),
             slots = word_value(check->header.layer_slots);
    uint64_t highest_id = 0, highest_slot = 0;
    int ret = 0;

    for (size_t i = 0; i < check->layer_count; i++) {
        const struct check_layer *found = &check->layers[i];

        if (found->layer.id > highest_id)
            highest_id = found->layer.id;
        if ((found->alive || found->layer.state == LAYER_OPEN) && found->layer.slot > highest_slot)
            highest_slot = found->layer.slot;
    }
    if (highest_id >= next) {
        check_corruption(check, true, "next_layer_id is %llu, but layer %llu exists",
                         (unsigned long long)next, (unsigned long long)highest_id);
        ret = check_set_header_word(check, offsetof(struct header, next_layer_id), highest_id + 1);
    }
    if (!ret && highest_slot >= slots) {
        check_corruption(check, true, "layer_slots is %llu, but record %llu is in use",
                         (unsigned long long)slots, (unsigned long long)highest_slot);
        ret = check_set_header_word(check, offsetof(struct header, layer_slots), highest_slot + 1);
    }
    return ret;
}

/* A hidden layer that nothing stands on is the rest of an interrupted delete. */
static int free_hidden(struct check *check)
{
    bool *has_child = calloc(check->layer_count + 1, sizeof *has_child);
    int ret = has_child ? 0 : error_set(check->error, -ENOMEM, "out of memory");

    /* From the newest down: freeing one may leave its parent, an older one, without children. */
    for (size_t i = check->layer_count; i-- > 0 && ret == 0;) {
        struct check_layer *found = &check->layers[i], *parent;

        if (!found->alive)
            continue;
        if (found->layer.state == LAYER_HIDDEN && !has_child[i]) {
            check_leak(check, "layer %u was being deleted when that was interrupted",
                       found->layer.id);
            found->alive = found->rewrite = false;
            found->doubtful = check->parents_lost;
            found->layer.state = LAYER_FREE;
            ret = check_store64(
                check, check_record_offset(check, found->layer.slot),
                layer_state_word(found->layer.id, LAYER_FREE, 0, found->layer.sequence));
            continue;
        }
        parent = found->layer.parent ? check_find_layer(check, found->layer.parent) : NULL;
        if (parent)
            has_child[parent - check->layers] = true;
    }
    free(has_child);
    return ret;
}

/* What was put in the place of a damaged field is a guess. A length of VM state loses nothing. */
static int lose_damaged(struct check *check)
{
    int ret = 0;

    for (size_t i = 0; i < check->layer_count && ret == 0; i++) {
        const struct check_layer *found = &check->layers[i];
        unsigned damage = found->damage & ~DAMAGED_STATE_SIZE;

        if (found->layer.state == LAYER_OPEN)
            damage &= ~DAMAGED_NAME;
        if (found->alive && damage)
            ret = check_lose_record(check, found->layer.id,
                                    check_record_offset(check, found->layer.slot));
    }
    return ret;
}

static int write_changed(struct check *check)
{
    int ret = 0;

    for (size_t i = 0; i < check->layer_count && ret == 0; i++)
        if (check->layers[i].rewrite && check->layers[i].alive) {
            ret = check->layers[i].damage ? check_raise_generation(check) : 0;
            if (!ret)
                ret = check_write_record(check, &check->layers[i].layer);
        }
    return ret;
}

int check_tree(struct check *check)
{
    uint64_t largest;
    int ret = 0;

    mark_alive(check);
    find_ends(check);
    largest = largest_size(check);
    for (size_t i = 0; i < check->layer_count && ret == 0; i++)
        if (!check->layers[i].alive)
            ret = free_damaged(check, &check->layers[i]);
    if (!ret)
        ret = settle_parents(check);
    for (size_t i = 0; i < check->layer_count && ret == 0; i++)
        if (check->layers[i].alive)
            settle_sizes(check, &check->layers[i], largest);
    if (!ret)
        ret = settle_names(check);
    if (!ret)
        ret = settle_counters(check);
    if (!ret)
        ret = lose_damaged(check);
    if (!ret)
        ret = write_changed(check);
    return ret ? ret : free_hidden(check);
}
