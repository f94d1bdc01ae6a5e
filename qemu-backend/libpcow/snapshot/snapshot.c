/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chain/chain.h"
#include "image/lock.h"
#include "image/remains.h"
#include "monitor/monitor.h"
#include "snapshot/change.h"
#include "snapshot/flags.h"
#include "snapshot/making.h"
#include "snapshot/pin.h"
#include "snapshot/sizes.h"
#include "snapshot/tree.h"
#include "util/error.h"

/*
 * The nearest ancestor of each layer that is a snapshot (hidden layers are passed over). Parents
 * have lower ids, so they come first.
 */
static uint32_t *visible_parents(const struct pcow_image *image)
{
    uint32_t *visible = calloc(image->layer_count + 1, sizeof *visible);

    for (size_t i = 0; visible && i < image->layer_count; i++) {
        const struct layer *parent =
            image->layers[i].parent ? layer_find(image, image->layers[i].parent) : NULL;

        if (parent)
            visible[i] =
                parent->state == LAYER_SNAPSHOT ? parent->id : visible[parent - image->layers];
    }
    return visible;
}

int pcow_snapshot_list(pcow_image *image, struct pcow_snapshot **result, size_t *count,
                       struct pcow_error *error)
{
    struct pcow_snapshot *list = calloc(image->layer_count + 1, sizeof *list);
    uint32_t current, *visible;
    int ret;

    *result = list;
    *count = 0;
    if (!list)
        return error_set(error, -ENOMEM, "out of memory");
    if (image->format1)
        return 0;
    visible = visible_parents(image);
    if (!visible) {
        free(list);
        *result = NULL;
        return error_set(error, -ENOMEM, "out of memory");
    }
    current = visible[layer_find(image, image_active(image)) - image->layers];
    for (size_t i = 0; i < image->layer_count; i++) {
        const struct layer *layer = &image->layers[i];
        struct pcow_snapshot *snapshot = &list[*count];

        if (layer->state != LAYER_SNAPSHOT)
            continue;
        snapshot->id = layer->id;
        snapshot->parent_id = visible[i];
        memcpy(snapshot->name, layer->name, sizeof snapshot->name);
        snapshot->date_seconds = layer->date_seconds;
        snapshot->date_nanoseconds = layer->date_nanoseconds;
        snapshot->virtual_size = layer->virtual_size;
        snapshot->state_size = layer->state_size;
        snapshot->current = layer->id == current;
        snapshot->pinned = pin_is_set(image, layer);
        ++*count;
    }
    free(visible);
    ret = sizes_fill(image, list, *count);
    if (ret) {
        free(list);
        *result = NULL;
        *count = 0;
        return error_set(error, ret, "out of memory");
    }
    return 0;
}

bool pcow_snapshot_find_prefix(const pcow_image *image, const char *prefix,
                               char name[PCOW_SNAPSHOT_NAME_SIZE])
{
    for (size_t i = 0; i < image->layer_count && !image->format1; i++) {
        const struct layer *layer = &image->layers[i];

        if (layer->state == LAYER_SNAPSHOT && !strncmp(layer->name, prefix, strlen(prefix))) {
            memcpy(name, layer->name, sizeof layer->name);
            return true;
        }
    }
    return false;
}

/* The commit is done: nothing below can take the revert back. */
static int drop_active(pcow_image *image, struct layer *gone, struct pcow_error *error)
{
    struct layout_lists *lists = NULL;
    int ret, rebuilt, mapped = 0;
    struct chain *chain;

    gone->state = LAYER_FREE;
    layer_remove(image, gone->id);
    ret = layer_store_state(image, gone, error);
    if (image->map) {
        lists = layout_note_lists(image->map);
        retire_tables(image->map);
    }
    chain = chain_set_aside(image);
    if (!ret)
        ret = tree_release_layer(image, gone->id, OWNER_DATA, error);
    if (ret)
        layer_hold_slot(image, gone->slot);
    if (!ret)
        ret = tree_collapse(image, gone->parent, error);
    if (!ret)
        ret = header_write_copy(image, error);
    /* What the next access would have to wait for. */
    rebuilt = chain_bring_back(image, chain, ret ? NULL : error);
    if (image->map)
        mapped = rebuilt ? monitor_unmap_all(image->map, ret ? NULL : error)
                         : monitor_map_changed(image->map, lists, ret ? NULL : error);
    layout_forget_lists(lists);
    return ret ? ret : rebuilt ? rebuilt : mapped;
}

/*
 * The layer to stand on, 0: none in this file, and the size that the image has then. Without a
 * name it has to be an image without snapshots: the tree of one that has has no second root.
 */
static int find_target(pcow_image *image, const char *name, uint32_t *target, uint64_t *size,
                       struct pcow_error *error)
{
    const struct layer *layer;

    if (!name) {
        for (size_t i = 0; i < image->layer_count; i++)
            if (image->layers[i].state == LAYER_SNAPSHOT)
                return error_set(error, -EBUSY,
                                 "%s has snapshots; revert to one of them, or delete them first",
                                 image->file.path);
        *target = 0;
        *size = image->size;
        return 0;
    }
    layer = snapshot_find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (image->map && layer->virtual_size != image->size)
        return error_set(
            error, -EBUSY,
            "%s: snapshot '%s' has another size (%llu bytes) than the memory that is mapped; "
            "stop the VM and revert then",
            image->file.path, name, (unsigned long long)layer->virtual_size);
    *target = layer->id;
    *size = layer->virtual_size;
    return 0;
}

static int revert(pcow_image *image, const char *name, struct pcow_error *error)
{
    struct layer gone, active = {0};
    uint32_t target = 0;
    uint64_t size = 0;
    int ret = find_target(image, name, &target, &size, error);

    if (ret)
        return ret;
    gone = *layer_find(image, image_active(image));
    ret = tree_reserve_layer(image, false, false, &active.id, &active.slot, error);
    /* A map without its chain could serve nobody. */
    if (!ret)
        ret = chain_reserve(image, error);
    if (!ret)
        ret = tree_record_layer(image, &active, target, size, false, error);
    if (ret)
        return ret;
    if (image->map)
        gate_close(image->map);
    ret = tree_put_active(image, &active, false, error);
    if (!ret)
        ret = drop_active(image, &gone, error);
    if (image->map)
        gate_open(image->map);
    return ret;
}

int pcow_snapshot_revert(pcow_image *image, const char *name, struct pcow_error *error)
{
    int ret = change_begin(image, error);

    if (ret)
        return ret;
    ret = revert(image, name, error);
    change_end(image);
    return ret;
}

/* The snapshot is locked: nobody reads it, and no image stands on it. */
static int delete(pcow_image *image, struct layer *layer, uint64_t *freed, struct pcow_error *error)
{
    /* Traps leave remains as well meanwhile, which count with those of the snapshot. */
    uint64_t before = __atomic_load_n(&image->remains_size, __ATOMIC_RELAXED);
    uint64_t state = (layer->state_size + PCOW_PAGE_SIZE - 1) & ~(PCOW_PAGE_SIZE - 1);
    uint32_t id = layer->id;
    unsigned flags = layer->flags;
    int ret = image_begin_change(image, error);

    if (ret)
        return ret;
    layer_name_remove(image, layer);
    layer->state = LAYER_HIDDEN;
    layer->flags &= ~(unsigned)LAYER_PINNED;
    ret = layer_store_state(image, layer, error);
    if (ret) {
        layer->state = LAYER_SNAPSHOT;
        layer->flags = flags;
        layer_name_add(image, layer);
        return ret;
    }
    /* No snapshot any more: its VM state can never be asked for again. */
    layer->state_size = 0;
    ret = layer_store_word(image, layer, offsetof(struct layer_record, state_size), 0, error);
    if (!ret)
        ret = tree_release_layer(image, id, OWNER_STATE, error);
    if (!ret)
        ret = tree_collapse(image, id, error);
    if (!ret)
        ret = header_write_copy(image, error);
    if (freed)
        *freed = __atomic_load_n(&image->remains_size, __ATOMIC_RELAXED) - before + state;
    return ret;
}

int pcow_snapshot_delete(pcow_image *image, const char *name, uint64_t *freed,
                         struct pcow_error *error)
{
    struct layer *layer;
    uint32_t id;
    int ret = change_lock(image, error);

    if (freed)
        *freed = 0;
    if (ret)
        return ret;
    layer = snapshot_find(image, name, error);
    /* It may take a while in a directory in which much happens. */
    ret = layer ? pin_check_free(image, &image->file, layer, error) : -ENOENT;
    if (ret) {
        unlock_tree(&image->file);
        return ret;
    }
    id = layer->id;
    change_hold(image);
    ret = delete(image, layer, freed, error);
    unlock_snapshot(&image->file, id);
    change_end(image);
    return ret;
}

int pcow_snapshot_check_delete(pcow_image *image, const char *name, struct pcow_error *error)
{
    struct layer *layer;
    int ret = change_lock(image, error);

    if (ret)
        return ret;
    layer = snapshot_find(image, name, error);
    ret = layer ? pin_check_free(image, &image->file, layer, error) : -ENOENT;
    if (!ret)
        unlock_snapshot(&image->file, layer->id);
    unlock_tree(&image->file);
    return ret;
}

static int rename_layer(pcow_image *image, const char *name, const char *new_name,
                        struct pcow_error *error)
{
    struct layer *layer, renamed, old;
    uint32_t unused_id, slot;
    int ret;

    layer = snapshot_find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (strcmp(name, new_name) == 0)
        return 0;
    ret = making_check_name(image, new_name, error);
    if (!ret)
        ret = flags_refresh(image, layer, error);
    if (ret)
        return ret;
    old = renamed = *layer;
    memset(renamed.name, 0, sizeof renamed.name);
    memcpy(renamed.name, new_name, strlen(new_name));
    renamed.sequence = (old.sequence + 1) & 0xff;
    /*
     * A second record of the same layer; storing its state word, with the higher sequence, is the
     * commit.
     */
    ret = tree_reserve_layer(image, true, false, &unused_id, &renamed.slot, error);
    if (!ret)
        ret = layer_write_record(image, &renamed, false, error);
    if (ret)
        return ret;
    layer = layer_find(image, old.id);
    layer_name_remove(image, layer);
    slot = renamed.slot;
    renamed.slot = old.slot;
    *layer = renamed;
    layer_move(image, layer, slot);
    layer_name_add(image, layer);
    /*
     * Nothing of it stays: that of a snapshot that is free tells of its deletion, and this one
     * lives.
     */
    image->stale_record = old.slot + 1;
    ret = tree_free_stale_record(image, error);
    /*
     * The next operation frees it first: while it is there it would bring back the snapshot, once
     * that is deleted.
     */
    if (ret)
        layer_hold_slot(image, old.slot);
    return ret;
}

int pcow_snapshot_rename(pcow_image *image, const char *name, const char *new_name,
                         struct pcow_error *error)
{
    int ret = change_begin(image, error);

    if (ret)
        return ret;
    ret = rename_layer(image, name, new_name, error);
    change_end(image);
    return ret;
}
