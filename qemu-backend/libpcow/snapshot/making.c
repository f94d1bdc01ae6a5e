/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/making.h"

#include <errno.h>
#include <string.h>

#include "chain/reclaim.h"
#include "image/lock.h"
#include "image/spare.h"
#include "monitor/monitor.h"
#include "snapshot/pin.h"
#include "snapshot/tree.h"
#include "util/clock.h"
#include "util/error.h"

int making_check_name(struct pcow_image *image, const char *name, struct pcow_error *error)
{
    if (!snapshot_name_is_valid(name, strlen(name) + 1))
        return error_set(error, -EINVAL,
                         "'%s' cannot be the name of a snapshot: 1 to %d bytes without control "
                         "characters are needed",
                         name, PCOW_SNAPSHOT_NAME_SIZE - 1);
    if (layer_find_name(image, name))
        return error_set(error, -EEXIST,
                         "%s has a snapshot '%s' already; delete it or choose another name",
                         image->file.path, name);
    return 0;
}

static void enter(struct pcow_image *image, enum making_step step)
{
    __atomic_store_n(&image->making.step, step, __ATOMIC_RELAXED);
    /* Class pmem and volatile: the metadata is where it belongs already. */
    if (image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE)
        image_note_stores(image);
    image->making.stored = image_stores(image);
}

static bool metadata_is_on_medium(const struct pcow_image *image)
{
    return image->file.persist.persistence != PCOW_PERSISTENCE_PAGE_CACHE
           || image_is_synced(image, image->making.stored);
}

static bool stores_are_on_medium(const struct pcow_image *image)
{
    return image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE
           || image_is_synced(image, image->making.stored);
}

/* ---- before the guest is held ---------------------------------------------------------------- */

/*
 * What is kept for the last snapshot stays, also when this one has its record, and has been
 * renamed.
 */
static int leave_spare_records(struct pcow_image *image, struct pcow_error *error)
{
    int ret = spare_is_kept(image) && !spare_is_in_use(image)
                  ? layer_allocate_spare(image, SPARE_RECORDS + 3)
                  : 0;

    return ret ? error_set_errno(error, ret,
                                 "%s: no space for the record of a snapshot beside those that are "
                                 "kept for the last one; free space in the pool",
                                 image->file.path)
               : 0;
}

static int reserve(struct pcow_image *image, const struct layer *wanted, struct pcow_error *error)
{
    struct making *making = &image->making;
    /* What is refused must not count as a change: images on this one would no longer open. */
    int ret = making_check_name(image, wanted->name, error);

    if (!ret)
        ret = leave_spare_records(image, error);
    if (ret == -ENOSPC && reclaim_for_space(image))
        ret = leave_spare_records(image, error);
    if (!ret)
        ret = tree_reserve_layer(image, true, true, &making->next.id, &making->next.slot, error);
    if (ret)
        return ret;
    layer_hold_slot(image, making->next.slot);
    making->layer = image_active(image);
    making->wanted = *wanted;
    enter(image, MAKING_RESERVED);
    return 0;
}

/* The map's thread rests from here on, for a while. */
static void note_prepared(struct making *making)
{
    making->prepared_ns = clock_now_ns();
}

static int record(struct pcow_image *image, struct pcow_error *error)
{
    struct making *making = &image->making;
    struct layer *layer = layer_find(image, making->layer);
    int ret;

    layer->date_seconds = making->wanted.date_seconds;
    layer->date_nanoseconds = making->wanted.date_nanoseconds;
    memcpy(layer->name, making->wanted.name, sizeof layer->name);
    /* The description of the active layer does not count until another layer is active. */
    ret = layer_write_description(image, layer, error);
    if (!ret)
        ret = tree_record_layer(image, &making->next, making->layer, layer->virtual_size, true,
                                error);
    if (!ret) {
        note_prepared(making);
        enter(image, MAKING_RECORDED);
    }
    return ret;
}

/* It counts for nothing yet. */
static void forget(struct pcow_image *image)
{
    if (image->making.step != MAKING_RESERVED && image->making.step != MAKING_RECORDED)
        return;
    layer_let_slot_go(image, image->making.next.slot);
    __atomic_store_n(&image->making.step, MAKING_NONE, __ATOMIC_RELAXED);
}

/* Of the layer that is active, as it is? */
static bool is_current(const struct pcow_image *image)
{
    const struct making *making = &image->making;
    const struct layer *layer = layer_find(image, making->layer);

    return making->layer == image_active(image)
           && (making->step == MAKING_RESERVED
               || layer->virtual_size == making->next.virtual_size);
}

static bool is_wanted(const struct making *making, const struct layer *wanted)
{
    return strcmp(making->wanted.name, wanted->name) == 0
           && making->wanted.date_seconds == wanted->date_seconds
           && making->wanted.date_nanoseconds == wanted->date_nanoseconds;
}

static uint64_t token_of(const struct making *making)
{
    return (uint64_t)making->next.id << 32 | making->layer;
}

uint64_t making_token(const struct pcow_image *image)
{
    return token_of(&image->making);
}

static bool is_mine(const struct making *making, uint64_t token)
{
    return making->step != MAKING_NONE && token_of(making) == token;
}

int making_prepare(struct pcow_image *image, const char *name, int64_t date_seconds,
                   uint32_t date_nanoseconds, uint64_t *token, struct pcow_error *error)
{
    struct layer wanted = {.date_seconds = date_seconds, .date_nanoseconds = date_nanoseconds};
    struct making *making = &image->making;
    int ret = 0;

    if (!snapshot_name_is_valid(name, strlen(name) + 1))
        return making_check_name(image, name, error);
    memcpy(wanted.name, name, strlen(name));
    if (making->step >= MAKING_FROZEN)
        ret = making_settle(image, error);
    else if (making->step != MAKING_NONE && (!is_wanted(making, &wanted) || !is_current(image)))
        forget(image);
    if (!ret && making->step == MAKING_NONE)
        ret = reserve(image, &wanted, error);
    if (!ret)
        *token = token_of(making);
    if (!ret && !metadata_is_on_medium(image))
        return PCOW_FLUSH_FIRST;
    if (!ret && making->step == MAKING_RESERVED)
        ret = record(image, error);
    if (!ret && !metadata_is_on_medium(image))
        return PCOW_FLUSH_FIRST;
    /* So that the commit need not wait until the file system lets the page be dirtied. */
    if (!ret)
        ret = header_touch(image, error);
    if (ret)
        forget(image);
    else
        note_prepared(making);
    return ret;
}

/* ---- while it is held ------------------------------------------------------------------------ */

int making_freeze(struct pcow_image *image, uint64_t token, struct pcow_error *error)
{
    struct making *making = &image->making;
    struct layer *frozen;
    int ret;

    if (making->step != MAKING_RECORDED || !is_mine(making, token) || !is_current(image)
        || !metadata_is_on_medium(image))
        return error_set(error, -ESTALE,
                         "%s has changed since the snapshot was prepared; nothing was done, try "
                         "again",
                         image->file.path);
    if (image->map)
        gate_close(image->map);
    ret = tree_put_active(image, &making->next, true, error);
    if (!ret) {
        /* No snapshot before all of it is on the medium, and nobody's layer any more. */
        frozen = layer_find(image, making->layer);
        frozen->state = LAYER_HIDDEN;
        frozen->frozen_for = making->next.id;
        if (image->map)
            ret = monitor_freeze(image->map, error);
        enter(image, MAKING_FROZEN);
    }
    if (image->map)
        gate_open(image->map);
    return ret;
}

/* ---- when it runs again ---------------------------------------------------------------------- */

/* In the file alone: in memory it is hidden until all of it is done. */
static int mark(struct pcow_image *image, struct pcow_error *error)
{
    struct layer marked = *layer_find(image, image->making.layer);
    int ret = lock_snapshot(&image->file, marked.id, true);

    if (ret)
        return error_set_errno(error, ret, "cannot lock snapshot '%s' of %s", marked.name,
                               image->file.path);
    marked.state = LAYER_SNAPSHOT;
    ret = layer_store_state_lazily(image, &marked, error);
    if (ret) {
        unlock_snapshot(&image->file, marked.id);
        return ret;
    }
    enter(image, MAKING_MARKED);
    return 0;
}

static void complete(struct pcow_image *image)
{
    struct layer *layer = layer_find(image, image->making.layer);

    layer->state = LAYER_SNAPSHOT;
    layer_name_add(image, layer);
    unlock_snapshot(&image->file, layer->id);
    __atomic_store_n(&image->making.step, MAKING_NONE, __ATOMIC_RELAXED);
}

/* Somebody else may have finished it. */
static int find_finished(const struct pcow_image *image, uint64_t token, struct pcow_error *error)
{
    const struct layer *layer = layer_find(image, making_layer(token));

    return layer && layer->state == LAYER_SNAPSHOT && layer->frozen_for == (uint32_t)(token >> 32)
               ? 0
               : error_set(error, -ESTALE, "%s: the snapshot that was being made is gone",
                           image->file.path);
}

int making_finish(struct pcow_image *image, uint64_t token, bool with_stores,
                  struct pcow_error *error)
{
    struct making *making = &image->making;
    int ret;

    if (!is_mine(making, token) || making->step < MAKING_FROZEN
        || making->step == MAKING_ABANDONED)
        return find_finished(image, token, error);
    if (making->step == MAKING_FROZEN) {
        /* It names the layer that was active before. */
        ret = header_write_copy(image, error);
        if (ret)
            return ret;
        if (with_stores ? !stores_are_on_medium(image) : !metadata_is_on_medium(image))
            return PCOW_FLUSH_FIRST;
        ret = mark(image, error);
        if (ret)
            return ret;
    }
    if (!metadata_is_on_medium(image))
        return PCOW_FLUSH_FIRST;
    complete(image);
    return 0;
}

void making_give_up(struct pcow_image *image, uint64_t token)
{
    struct making *making = &image->making;

    if (!is_mine(making, token))
        return;
    if (making->step >= MAKING_FROZEN)
        __atomic_store_n(&making->step, MAKING_ABANDONED, __ATOMIC_RELAXED);
    else
        forget(image);
}

/*
 * Its record must say so before any other change of the tree: an open layer that is not right
 * beneath the active one counts for nothing, with all that the guest has in it.
 */
static int hide(struct pcow_image *image, struct pcow_error *error)
{
    struct layer *layer = layer_find(image, image->making.layer);
    /* That another layer is active comes first: one that is hidden cannot be. */
    int ret = image_sync(image);

    if (ret)
        return error_set_errno(error, ret, "cannot flush %s", image->file.path);
    ret = layer_store_state(image, layer, error);
    if (ret)
        return ret;
    unlock_snapshot(&image->file, layer->id);
    __atomic_store_n(&image->making.step, MAKING_NONE, __ATOMIC_RELAXED);
    ret = tree_collapse(image, layer->id, error);
    return ret ? ret : header_write_copy(image, error);
}

int making_settle(struct pcow_image *image, struct pcow_error *error)
{
    struct making *making = &image->making;
    int ret;

    if (making->step < MAKING_FROZEN) {
        forget(image);
        return 0;
    }
    if (making->step == MAKING_ABANDONED)
        return hide(image, error);
    while ((ret = making_finish(image, token_of(making), true, error)) == PCOW_FLUSH_FIRST) {
        ret = image_sync_stores(image);
        if (ret)
            return error_set_errno(error, ret, "cannot flush %s", image->file.path);
    }
    return ret;
}
