/* SPDX-License-Identifier: BSD-3-Clause */
/* The state of a virtual machine, kept with a snapshot. */
#include <errno.h>

#include "chain/reclaim.h"
#include "image/remains.h"
#include "snapshot/tree.h"
#include "util/error.h"

static uint64_t find_piece(const struct pcow_image *image, uint32_t layer, uint64_t piece)
{
    for (uint64_t p = 1; p < image_slab_count(image); p++) {
        const struct slab owner = slab_peek(image, p);

        if (owner.kind == OWNER_STATE && owner.layer == layer && owner.number == piece)
            return p;
    }
    return 0;
}

/* It lies in one piece. */
static int write_piece(struct pcow_image *image, uint32_t layer, uint64_t offset, const void *from, size_t length)
{
    uint32_t number = (uint32_t)(offset >> SLAB_BITS);
    uint64_t slab = find_piece(image, layer, number);
    bool is_new = slab == 0;
    int ret = is_new ? slab_take(image, &slab) : 0;

    if (ret)
        return ret;
    ret = file_write_data(&image->file, (slab << SLAB_BITS) + offset % PCOW_SLAB_SIZE, from, length);
    if (!ret && is_new)
        ret = slab_publish(image, slab, (struct owner){OWNER_STATE, layer, number}, false);
    if (ret && is_new) {
        remains_leave(image, slab, 0);
        slab_untake(image, slab);
    }
    return ret;
}

int pcow_snapshot_write_state(pcow_image *image, const char *name, uint64_t offset, const void *buffer, size_t length,
                              struct pcow_error *error)
{
    const char *from = buffer;
    struct layer *layer;
    int ret = image_begin_change(image, error);

    if (ret)
        return ret;
    layer = snapshot_find(image, name, error);
    if (!layer)
        return -ENOENT;
    if (offset > PCOW_MAX_VIRTUAL_SIZE || length > PCOW_MAX_VIRTUAL_SIZE - offset)
        return error_set(error, -EFBIG, "%s: VM state of more than 16 TiB", image->file.path);
    while (length > 0) {
        uint64_t rest = PCOW_SLAB_SIZE - offset % PCOW_SLAB_SIZE;
        size_t piece = rest < length ? rest : length;

        ret = write_piece(image, layer->id, offset, from, piece);
        if (ret == -ENOSPC && reclaim_for_space(image))
            ret = write_piece(image, layer->id, offset, from, piece);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot store VM state", image->file.path);
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
    layer = snapshot_find(image, name, error);
    if (!layer)
        return -ENOENT;
    for (uint64_t piece = 0; piece << SLAB_BITS < size; piece++)
        if (!find_piece(image, layer->id, piece))
            return error_set(error, -EINVAL, "%s: VM state of '%s' was not written up to %llu", image->file.path, name,
                             (unsigned long long)size);
    if (image_sync(image))
        return error_set_errno(error, -EIO, "cannot flush %s", image->file.path);
    ret = layer_store_word(image, layer, offsetof(struct layer_record, state_size), size, error);
    if (!ret)
        layer->state_size = size;
    return ret;
}

int pcow_snapshot_read_state(pcow_image *image, const char *name, uint64_t offset, void *buffer, size_t length,
                             struct pcow_error *error)
{
    struct layer *layer = snapshot_find(image, name, error);
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
