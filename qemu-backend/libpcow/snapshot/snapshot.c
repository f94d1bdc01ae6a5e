/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "chain/chain.h"
#include "monitor/monitor.h"
#include "snapshot/tree.h"
#include "util/error.h"

static struct layer *find(struct pcow_image *image, const char *name, struct pcow_error *error)
{
    struct layer *layer = image->format1 ? NULL : layer_find_name(image, name);

    if (!layer)
        error_set(error, -ENOENT, "%s has no snapshot '%s'; pcow-img snapshot -l lists them", image->file.path, name);
    return layer;
}

static int check_new_name(const struct pcow_image *image, const char *name, struct pcow_error *error)
{
    if (!snapshot_name_is_valid(name, strlen(name) + 1))
        return error_set(error, -EINVAL, "'%s' cannot be the name of a snapshot: 1 to %d bytes without control characters are needed",
                         name, PCOW_SNAPSHOT_NAME_SIZE - 1);
    if (layer_find_name(image, name))
        return error_set(error, -EEXIST, "%s has a snapshot '%s' already; delete it or choose another name", image->file.path, name);
    return 0;
}

/* The nearest ancestor that is a snapshot (hidden layers are passed over). */
static uint32_t visible_parent(const struct pcow_image *image, const struct layer *layer)
{
    while (layer && layer->parent) {
        layer = layer_find(image, layer->parent);
        if (layer && layer->state == LAYER_SNAPSHOT)
            return layer->id;
    }
    return 0;
}

/* One pass over the slabs for all layers: a list of thousands of snapshots stays linear. */
static void add_data_sizes(const struct pcow_image *image, struct pcow_snapshot *list, size_t count)
{
    for (uint64_t p = 1; p < image->slab_count; p++) {
        size_t low = 0, high = count;

        if (image->slabs[p].kind != OWNER_DATA)
            continue;
        while (low < high) {
            size_t middle = low + (high - low) / 2;

            if (list[middle].id < image->slabs[p].layer)
                low = middle + 1;
            else
                high = middle;
        }
        if (low < count && list[low].id == image->slabs[p].layer)
            list[low].data_size += page_set_count(&image->valid[p]) * PCOW_PAGE_SIZE;
    }
}

int pcow_snapshot_list(pcow_image *image, struct pcow_snapshot **result, size_t *count, struct pcow_error *error)
{
    struct pcow_snapshot *list = calloc(image->layer_count + 1, sizeof *list);
    uint32_t current;

    *result = list;
    *count = 0;
    if (!list)
        return error_set(error, -ENOMEM, "out of memory");
    if (image->format1)
        return 0;
    current = visible_parent(image, layer_find(image, image_active(image)));
    for (size_t i = 0; i < image->layer_count; i++) {
        const struct layer *layer = &image->layers[i];
        struct pcow_snapshot *snapshot = &list[*count];

        if (layer->state != LAYER_SNAPSHOT)
            continue;
        snapshot->id = layer->id;
        snapshot->parent_id = visible_parent(image, layer);
        memcpy(snapshot->name, layer->name, sizeof snapshot->name);
        snapshot->date_seconds = layer->date_seconds;
        snapshot->date_nanoseconds = layer->date_nanoseconds;
        snapshot->virtual_size = layer->virtual_size;
        snapshot->state_size = layer->state_size;
        snapshot->current = layer->id == current;
        ++*count;
    }
    add_data_sizes(image, list, *count);
    return 0;
}

int pcow_snapshot_create(pcow_image *image, const char *name, struct pcow_error *error)
{
    uint32_t frozen_id;
    struct layer *frozen;
    struct timespec now;
    int ret = image_check_writable(image, error);

    /* What is refused must not count as a change: images on this one would no longer open. */
    if (!ret)
        ret = check_new_name(image, name, error);
    if (!ret)
        ret = image_begin_change(image, error);
    if (!ret && file_sync(&image->file))
        ret = error_set_errno(error, -EIO, "cannot flush %s", image->file.path);
    if (ret)
        return ret;
    frozen_id = image_active(image);
    frozen = layer_find(image, frozen_id);
    clock_gettime(CLOCK_REALTIME, &now);
    frozen->date_seconds = now.tv_sec;
    frozen->date_nanoseconds = (uint32_t)now.tv_nsec;
    memset(frozen->name, 0, sizeof frozen->name);
    memcpy(frozen->name, name, strlen(name));
    /* The description of the active layer does not count until another layer is active. */
    ret = layer_write_description(image, frozen, error);
    if (!ret)
        ret = tree_put_active(image, frozen_id, frozen->virtual_size, true, error);
    if (ret)
        return ret;
    /* From here on it is a snapshot, whatever happens: tree_finish_interrupted() would do the rest. */
    frozen = layer_find(image, frozen_id);
    frozen->state = LAYER_SNAPSHOT;
    if (image->map)
        ret = monitor_freeze(image->map, error);
    if (!ret)
        ret = layer_store_state(image, frozen, error);
    return ret ? ret : header_write_copy(image, error);
}

int pcow_snapshot_revert(pcow_image *image, const char *name, struct pcow_error *error)
{
    uint32_t dropped, target;
    struct layer *layer, gone;
    uint64_t size;
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    layer = find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (image->map && layer->virtual_size != image->size)
        return error_set(error, -EBUSY, "%s: snapshot '%s' has another size (%llu bytes) than the memory that is mapped; "
                         "stop the VM and revert then", image->file.path, name, (unsigned long long)layer->virtual_size);
    ret = image_begin_change(image, error);
    if (ret)
        return ret;
    target = layer->id;
    size = layer->virtual_size;
    dropped = image_active(image);
    gone = *layer_find(image, dropped);
    ret = tree_put_active(image, target, size, false, error);
    if (ret)
        return ret;
    /* The commit is done: nothing below can take the revert back. */
    gone.state = LAYER_FREE;
    layer_remove(image, dropped);
    ret = layer_store_state(image, &gone, error);
    if (!ret && image->map)
        ret = monitor_unmap_all(image->map, error);
    chain_free(image);
    if (!ret)
        ret = tree_release_layer(image, dropped, OWNER_DATA, NULL, error);
    if (!ret)
        ret = tree_collapse(image, NULL, error);
    if (!ret)
        ret = header_write_copy(image, error);
    if (image->map && !chain_get(image, error))
        return -ENOMEM;
    if (image->map) {
        int mapped = monitor_map_all(image->map, error);

        ret = ret ? ret : mapped;
    }
    return ret;
}

int pcow_snapshot_delete(pcow_image *image, const char *name, uint64_t *freed, struct pcow_error *error)
{
    uint64_t bytes = 0;
    struct layer *layer;
    uint32_t id;
    int ret = image_check_writable(image, error);

    if (freed)
        *freed = 0;
    if (ret)
        return ret;
    layer = find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (layer->flags & LAYER_PINNED)
        return error_set(error, -EBUSY, "%s: images stand on snapshot '%s'; delete or rebase them first", image->file.path, name);
    ret = image_begin_change(image, error);
    if (ret)
        return ret;
    id = layer->id;
    layer->state = LAYER_HIDDEN;
    ret = layer_store_state(image, layer, error);
    if (ret) {
        layer->state = LAYER_SNAPSHOT;
        return ret;
    }
    /* No snapshot any more: its VM state can never be asked for again. */
    layer->state_size = 0;
    ret = layer_store_word(image, layer, offsetof(struct layer_record, state_size), 0, error);
    if (!ret)
        ret = tree_release_layer(image, id, OWNER_STATE, &bytes, error);
    if (!ret)
        ret = tree_collapse(image, &bytes, error);
    if (!ret)
        ret = header_write_copy(image, error);
    if (freed)
        *freed = bytes;
    return ret;
}

int pcow_snapshot_rename(pcow_image *image, const char *name, const char *new_name, struct pcow_error *error)
{
    struct layer *layer, renamed, old;
    uint32_t unused_id;
    int ret = image_check_writable(image, error);

    if (ret)
        return ret;
    layer = find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (strcmp(name, new_name) == 0)
        return 0;
    ret = check_new_name(image, new_name, error);
    if (!ret)
        ret = image_begin_change(image, error);
    if (ret)
        return ret;
    old = renamed = *layer;
    memset(renamed.name, 0, sizeof renamed.name);
    memcpy(renamed.name, new_name, strlen(new_name));
    renamed.sequence = (old.sequence + 1) & 0xff;
    /* A second record of the same layer; storing its state word, with the higher sequence, is the commit. */
    ret = layer_reserve(image, true, &unused_id, &renamed.slot, error);
    if (!ret)
        ret = layer_write_record(image, &renamed, error);
    if (ret)
        return ret;
    *layer_find(image, old.id) = renamed;
    old.state = LAYER_FREE;
    return layer_store_state(image, &old, error);
}

/* ---- VM state ------------------------------------------------------------------------------------------------------ */

static uint64_t find_piece(const struct pcow_image *image, uint32_t layer, uint64_t piece)
{
    for (uint64_t p = 1; p < image->slab_count; p++)
        if (image->slabs[p].kind == OWNER_STATE && image->slabs[p].layer == layer && image->slabs[p].number == piece)
            return p;
    return 0;
}

int pcow_snapshot_write_state(pcow_image *image, const char *name, uint64_t offset, const void *buffer, size_t length,
                              struct pcow_error *error)
{
    const char *from = buffer;
    struct layer *layer;
    int ret = image_begin_change(image, error);

    if (ret)
        return ret;
    layer = find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (offset > PCOW_MAX_VIRTUAL_SIZE || length > PCOW_MAX_VIRTUAL_SIZE - offset)
        return error_set(error, -EFBIG, "%s: VM state of more than 16 TiB", image->file.path);
    while (length > 0) {
        uint64_t slab = find_piece(image, layer->id, offset >> SLAB_BITS), in_slab = offset % PCOW_SLAB_SIZE;
        size_t piece = PCOW_SLAB_SIZE - in_slab < length ? PCOW_SLAB_SIZE - in_slab : length;
        bool is_new = slab == 0;

        if (is_new)
            ret = slab_take(image, &slab);
        if (!ret)
            ret = file_write_data(&image->file, (slab << SLAB_BITS) + in_slab, from, piece);
        if (!ret && is_new)
            ret = slab_publish(image, slab, (struct owner){OWNER_STATE, layer->id, (uint32_t)(offset >> SLAB_BITS)}, false);
        if (ret) {
            if (is_new && slab)
                slab_untake(image, slab);
            return error_set_errno(error, ret, "%s: cannot store VM state", image->file.path);
        }
        from += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}

int pcow_snapshot_set_state_size(pcow_image *image, const char *name, uint64_t size, struct pcow_error *error)
{
    struct layer *layer;
    int ret = image_begin_change(image, error);

    if (ret)
        return ret;
    layer = find(image, name, error);
    if (!layer)
        return -ENOENT;
    for (uint64_t piece = 0; piece << SLAB_BITS < size; piece++)
        if (!find_piece(image, layer->id, piece))
            return error_set(error, -EINVAL, "%s: VM state of '%s' was not written up to %llu", image->file.path, name,
                             (unsigned long long)size);
    if (file_sync(&image->file))
        return error_set_errno(error, -EIO, "cannot flush %s", image->file.path);
    ret = layer_store_word(image, layer, offsetof(struct layer_record, state_size), size, error);
    if (!ret)
        layer->state_size = size;
    return ret;
}

int pcow_snapshot_read_state(pcow_image *image, const char *name, uint64_t offset, void *buffer, size_t length,
                             struct pcow_error *error)
{
    struct layer *layer = find(image, name, error);
    char *to = buffer;

    if (!layer)
        return -ENOENT;
    if (offset > layer->state_size || length > layer->state_size - offset)
        return error_set(error, -EINVAL, "%s: VM state of '%s' has %llu bytes only", image->file.path, name,
                         (unsigned long long)layer->state_size);
    while (length > 0) {
        uint64_t slab = find_piece(image, layer->id, offset >> SLAB_BITS), in_slab = offset % PCOW_SLAB_SIZE;
        size_t piece = PCOW_SLAB_SIZE - in_slab < length ? PCOW_SLAB_SIZE - in_slab : length;
        int ret = slab ? file_read(&image->file, (slab << SLAB_BITS) + in_slab, to, piece) : -EBADMSG;

        if (ret)
            return error_set_errno(error, ret, "%s: cannot read VM state of '%s'", image->file.path, name);
        to += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}
