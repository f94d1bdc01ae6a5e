/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which layer is the active one, and layers that others need but whose record is gone. A layer
 * exists for certain if it is active, if it is the parent of one that exists, or if it owns slabs
 * and no record says that it is dead: records are written before and freed before the slabs, so an
 * owner that nobody knows means a lost record and not an interrupted operation.
 */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/error.h"

static uint32_t active_id(const struct check *check)
{
    return (uint32_t)word_value(check->header.active_layer);
}

static bool is_frozen(const struct check_layer *found)
{
    return found->layer.state == LAYER_SNAPSHOT || found->layer.state == LAYER_HIDDEN;
}

/*
 * An open layer for an active_layer that cannot be believed: the oldest, or the one that an
 * interrupted snapshot put on it.
 */
static struct check_layer *guess_active(const struct check *check)
{
    struct check_layer *guess = NULL;

    for (size_t i = 0; i < check->layer_count; i++) {
        struct check_layer *found = &check->layers[i];

        if (found->layer.state == LAYER_OPEN && (!guess || found->layer.parent == guess->layer.id))
            guess = found;
    }
    return guess;
}

/* With no open layer at all, an empty one is put on the newest snapshot. */
static int put_active(struct check *check)
{
    struct check_layer made = {.damage = DAMAGED_SIZE | DAMAGED_LIMIT, .rewrite = true};
    uint64_t next = word_value(check->header.next_layer_id);
    int ret;

    for (size_t i = 0; i < check->layer_count; i++) {
        if (is_frozen(&check->layers[i]))
            made.layer.parent = check->layers[i].layer.id;
        if (check->layers[i].layer.id >= next)
            next = check->layers[i].layer.id + 1;
    }
    if (next > MAX_LAYER_ID)
        return error_set(check->error, -ENOSPC,
                         "%s: no layer id is left for a new active layer; read the snapshots with "
                         "pcow-img convert",
                         check->file.path);
    made.layer.id = (uint32_t)next;
    made.layer.state = LAYER_OPEN;
    ret = check_take_slot(check, &made.layer.slot);
    if (ret)
        return error_set(check->error, ret, "%s: no layer record is free for a new active layer",
                         check->file.path);
    ret = check_set_header_word(check, offsetof(struct header, next_layer_id), next + 1);
    if (!ret)
        ret = check_add_layer(check, &made);
    check_sort_layers(check);
    return ret ? ret : check_set_header_word(check, offsetof(struct header, active_layer), next);
}

static bool owns_slabs(const struct check *check, uint32_t id)
{
    for (size_t i = 0; i < check->count; i++)
        if (check->slabs[i].owner.kind != OWNER_NONE && check->slabs[i].owner.layer == id)
            return true;
    return false;
}

static int settle_active(struct check *check)
{
    const struct check_layer *named = check_find_layer(check, active_id(check));
    struct check_layer *guess = guess_active(check);
    int ret;

    /*
     * No record at all: it is made anew below, unless another open layer is the better candidate.
     */
    if (named ? named->layer.state == LAYER_OPEN : !guess || owns_slabs(check, active_id(check)))
        return 0;
    check_corruption(check, true, "the header names layer %u as the active one, but that %s; %s",
                     active_id(check),
                     !named                             ? "has no record"
                     : named->layer.state == LAYER_FREE ? "is deleted"
                                                        : "is a snapshot",
                     guess ? "the open layer is taken"
                           : "an empty layer is put on the newest snapshot");
    ret = check_lose_record(check, active_id(check), 0);
    if (!ret)
        ret = check_raise_generation(check);
    if (ret)
        return ret;
    return guess ? check_set_header_word(check, offsetof(struct header, active_layer),
                                         guess->layer.id)
                 : put_active(check);
}

/* ---- ids that must exist --------------------------------------------------------------------- */

struct ids {
    uint32_t *id;
    size_t count, capacity;
};

static int add_id(struct check *check, struct ids *ids, uint32_t id)
{
    if (ids->count && ids->id[ids->count - 1] == id)
        return 0;
    if (ids->count == ids->capacity) {
        size_t capacity = ids->capacity ? ids->capacity * 2 : 64;
        uint32_t *grown = realloc(ids->id, capacity * sizeof *grown);

        if (!grown)
            return error_set(check->error, -ENOMEM, "out of memory");
        ids->id = grown;
        ids->capacity = capacity;
    }
    ids->id[ids->count++] = id;
    return 0;
}

static int compare_ids(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;

    return a < b ? -1 : a > b;
}

/*
 * The owner of a slab was never given out: unless the count of ids is what was lost, the owner word
 * is wrong.
 */
static int check_new_id(struct check *check, struct check_slab *slab, struct ids *ids)
{
    static const struct owner nobody = {.kind = OWNER_NONE};

    if (slab->owner.layer < word_value(check->header.next_layer_id) || check->ids_uncertain)
        return add_id(check, ids, slab->owner.layer);
    check_corruption(check, true,
                     "file slab %llu belongs to layer %u, an id that was never given out",
                     (unsigned long long)slab->slab, slab->owner.layer);
    return check_drop_slab(check, slab, &nobody);
}

static int find_missing(struct check *check, struct ids *ids)
{
    int ret = check_find_layer(check, active_id(check)) ? 0 : add_id(check, ids, active_id(check));
    size_t kept = 0;

    for (size_t i = 0; i < check->layer_count && ret == 0; i++) {
        const struct check_layer *found = &check->layers[i];

        if ((is_frozen(found) || found->layer.id == active_id(check)) && found->layer.parent
            && !check_find_layer(check, found->layer.parent))
            ret = add_id(check, ids, found->layer.parent);
    }
    for (size_t i = 0; i < check->count && ret == 0; i++)
        if ((check->slabs[i].owner.kind == OWNER_DATA || check->slabs[i].owner.kind == OWNER_STATE)
            && !check_find_layer(check, check->slabs[i].owner.layer))
            ret = check_new_id(check, &check->slabs[i], ids);
    if (ids->count)
        qsort(ids->id, ids->count, sizeof *ids->id, compare_ids);
    for (size_t i = 0; i < ids->count; i++)
        if (i == 0 || ids->id[i] != ids->id[i - 1])
            ids->id[kept++] = ids->id[i];
    ids->count = kept;
    return ret;
}

/* ---- making them ----------------------------------------------------------------------------- */

/*
 * Whether an image stands on a layer that is made again, its lost state word would have told. So it
 * is pinned: a delete then looks for those that do.
 */

/* The one record whose id cannot be read belongs to the one layer that has none. */
static int adopt_lost_record(struct check *check, uint32_t id, struct check_layer *made)
{
    struct layer_record record;
    uint32_t slot = check->lost_slots[0];
    int ret = check_read(check, check_record_offset(check, slot), &record, sizeof record);

    if (ret)
        return ret;
    record.state = layer_state_word(id, LAYER_SNAPSHOT, LAYER_PINNED, 0);
    made->damage = check_decode(&record, slot, &made->layer);
    check->lost_count = 0;
    check_corruption(check, true,
                     "the state word of layer record %u is damaged; it is the record of layer %u",
                     slot, id);
    return 0;
}

static int make_layer(struct check *check, uint32_t id, bool only)
{
    struct check_layer made = {.layer.id = id, .damage = DAMAGED_ALL, .rewrite = true};
    bool active = id == active_id(check);
    int ret = check_raise_generation(check);

    if (!ret && only && check->lost_count == 1) {
        ret = adopt_lost_record(check, id, &made);
    } else if (!ret) {
        if (check_take_slot(check, &made.layer.slot))
            return error_set(check->error, -ENOSPC,
                             "%s: no layer record is free for the lost layer %u", check->file.path,
                             id);
        check_corruption(check, true, "%s layer %u has no record; %s",
                         active ? "the active" : "the", id,
                         active ? "one is made for it" : "it is made a snapshot, 'recovered-<id>'");
    }
    made.rewrite = true;
    made.layer.state = active ? LAYER_OPEN : LAYER_SNAPSHOT;
    made.layer.flags = active ? 0 : LAYER_PINNED;
    return ret ? ret : check_add_layer(check, &made);
}

static int drop_lost_records(struct check *check)
{
    int ret = 0;

    for (size_t i = 0; i < check->lost_count && ret == 0; i++) {
        uint32_t slot = check->lost_slots[i];

        check_corruption(check, true,
                         "layer record %u is damaged and nothing tells whose it is; if it was a "
                         "snapshot without data of its "
                         "own, that is gone",
                         slot);
        check->slot_taken[slot] = false;
        /* A slot that was never used held nothing. */
        if (slot < word_value(check->header.layer_slots) || check->slots_uncertain)
            ret = check_lose_record(check, 0, check_record_offset(check, slot));
        if (!ret)
            ret = check_store64(check, check_record_offset(check, slot), 0);
    }
    return ret;
}

/* A layer that others stand on, with a record that says it is dead. */
static int revive_parents(struct check *check)
{
    const struct check_layer *active = check_find_layer(check, active_id(check));
    uint32_t parent_of_active = active ? active->layer.parent : 0;

    /* From the newest down: a parent has a lower id, so those that it needs in turn come later. */
    for (size_t i = check->layer_count; i-- > 0;) {
        struct check_layer *child = &check->layers[i];
        struct check_layer *found =
            child->layer.parent ? check_find_layer(check, child->layer.parent) : NULL;
        int ret;

        if (!found || is_frozen(found)
            || (!is_frozen(child) && child->layer.id != active_id(check)))
            continue;
        if (found == active) {
            /* Nothing can stand on what is still written to. */
            child->damage |= DAMAGED_PARENT;
            child->layer.parent = 0;
            continue;
        }
        if (found->layer.state == LAYER_OPEN && found->layer.id == parent_of_active)
            continue;
        check_corruption(check, true,
                         "layer %u stands on layer %u, whose record says that it was deleted",
                         child->layer.id, found->layer.id);
        ret = check_raise_generation(check);
        if (!ret && check->slot_taken[found->layer.slot] && found->layer.state == LAYER_FREE)
            ret = check_take_slot(check, &found->layer.slot);
        if (ret)
            return error_set_errno(check->error, ret, "%s: cannot make layer %u again",
                                   check->file.path, found->layer.id);
        check->slot_taken[found->layer.slot] = true;
        found->layer.state = LAYER_SNAPSHOT;
        found->layer.flags |= LAYER_PINNED;
        found->rewrite = true;
    }
    return 0;
}

int check_rebuild(struct check *check)
{
    struct ids missing = {0};
    int ret = settle_active(check);

    /* A record that is found again may name a parent that is missing in turn. */
    do {
        missing.count = 0;
        if (!ret)
            ret = find_missing(check, &missing);
        for (size_t i = 0; i < missing.count && ret == 0; i++)
            ret = make_layer(check, missing.id[i], missing.count == 1);
        check_sort_layers(check);
    } while (missing.count && ret == 0);
    free(missing.id);
    if (!ret)
        ret = drop_lost_records(check);
    return ret ? ret : revive_parents(check);
}
