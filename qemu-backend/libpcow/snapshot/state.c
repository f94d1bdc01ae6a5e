/* SPDX-License-Identifier: BSD-3-Clause */
/* The state of a virtual machine, kept with a snapshot. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chain/reclaim.h"
#include "image/datasum.h"
#include "image/remains.h"
#include "image/spare.h"
#include "snapshot/tree.h"
#include "util/error.h"

/*
 * The pieces of one layer's state, by number: found by one look at all slabs, as there may be many
 * of both.
 */
struct state_index {
    uint32_t layer;
    size_t count, capacity;
    struct state_piece {
        uint32_t number;
        uint64_t slab;
    } *piece;
};

void state_forget(struct pcow_image *image)
{
    if (image->state)
        free(image->state->piece);
    free(image->state);
    image->state = NULL;
}

/* The first piece of this number or above. */
static size_t position(const struct state_index *index, uint64_t number)
{
    size_t low = 0, high = index->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (index->piece[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool append(struct state_index *index, uint32_t number, uint64_t slab)
{
    if (index->count == index->capacity) {
        size_t capacity = index->capacity ? index->capacity * 2 : 64;
        struct state_piece *piece = realloc(index->piece, capacity * sizeof *piece);

        if (!piece)
            return false;
        index->piece = piece;
        index->capacity = capacity;
    }
    index->piece[index->count++] = (struct state_piece){number, slab};
    return true;
}

static int by_number(const void *left, const void *right)
{
    const struct state_piece *a = left, *b = right;

    if (a->number != b->number)
        return a->number < b->number ? -1 : 1;
    return a->slab < b->slab ? -1 : a->slab > b->slab;
}

static int build(struct pcow_image *image, uint32_t layer)
{
    if (image->state && image->state->layer == layer)
        return 0;
    state_forget(image);
    image->state = calloc(1, sizeof *image->state);
    if (!image->state)
        return -ENOMEM;
    image->state->layer = layer;
    for (uint64_t p = 1; p < image_slab_count(image); p++) {
        const struct slab owner = slab_peek(image, p);

        if (owner.kind == OWNER_STATE && owner.layer == layer
            && !append(image->state, owner.number, p)) {
            state_forget(image);
            return -ENOMEM;
        }
    }
    if (image->state->count)
        qsort(image->state->piece, image->state->count, sizeof *image->state->piece, by_number);
    return 0;
}

/* *slab: 0 if there is none. */
static int find_piece(struct pcow_image *image, uint32_t layer, uint64_t number, uint64_t *slab)
{
    int ret = build(image, layer);
    size_t at;

    *slab = 0;
    if (ret)
        return ret;
    at = position(image->state, number);
    if (at < image->state->count && image->state->piece[at].number == number)
        *slab = image->state->piece[at].slab;
    return 0;
}

/* It was published. Mostly they come in order. */
static void add_piece(struct pcow_image *image, uint32_t number, uint64_t slab)
{
    struct state_index *index = image->state;
    size_t at = position(index, number);

    if (!append(index, number, slab)) {
        state_forget(image);           /* it is built anew when it is asked for */
        return;
    }
    memmove(&index->piece[at + 1], &index->piece[at],
            (index->count - 1 - at) * sizeof *index->piece);
    index->piece[at] = (struct state_piece){number, slab};
}

/* It lies in one piece. spare: in a slab that is kept for that, if a new one is needed. */
static int write_piece(struct pcow_image *image, uint32_t layer, uint64_t offset, const void *from,
                       size_t length, bool spare)
{
    uint32_t number = (uint32_t)(offset >> SLAB_BITS);
    uint64_t slab;
    int ret = find_piece(image, layer, number, &slab);
    bool is_new = slab == 0;

    if (!ret && is_new && spare)
        ret = spare_take(image, &slab) ? 0 : -ENOSPC;
    else if (!ret)
        ret = is_new ? slab_take(image, &slab) : datasum_drop(&image->file, slab);
    if (ret)
        return ret;
    ret =
        file_write_data(&image->file, (slab << SLAB_BITS) + offset % PCOW_SLAB_SIZE, from, length);
    if (!ret && is_new)
        ret = slab_publish(image, slab, (struct owner){OWNER_STATE, layer, number}, false);
    if (!ret && is_new)
        add_piece(image, number, slab);
    if (ret && is_new) {
        remains_leave(image, slab, 0);
        slab_untake(image, slab);
    }
    return ret;
}

int pcow_snapshot_write_state(pcow_image *image, const char *name, uint64_t offset,
                              const void *buffer, size_t length, struct pcow_error *error)
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

        ret = write_piece(image, layer->id, offset, from, piece, false);
        if (ret == -ENOSPC && reclaim_for_space(image))
            ret = write_piece(image, layer->id, offset, from, piece, false);
        if (ret == -ENOSPC && spare_is_in_use(image))
            ret = write_piece(image, layer->id, offset, from, piece, true);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot store VM state", image->file.path);
        from += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}

int pcow_snapshot_set_state_size(pcow_image *image, const char *name, uint64_t size,
                                 struct pcow_error *error)
{
    struct layer *layer;
    int ret = image_begin_change(image, error);

    if (ret)
        return ret;
    layer = snapshot_find(image, name, error);
    if (!layer)
        return -ENOENT;
    for (uint64_t piece = 0, slab; piece << SLAB_BITS < size; piece++)
        if (find_piece(image, layer->id, piece, &slab) || !slab)
            return error_set(error, -EINVAL, "%s: VM state of '%s' was not written up to %llu",
                             image->file.path, name, (unsigned long long)size);
    if (image_sync(image))
        return error_set_errno(error, -EIO, "cannot flush %s", image->file.path);
    ret = layer_store_word(image, layer, offsetof(struct layer_record, state_size), size, error);
    if (!ret)
        layer->state_size = size;
    return ret;
}

int pcow_snapshot_read_state(pcow_image *image, const char *name, uint64_t offset, void *buffer,
                             size_t length, struct pcow_error *error)
{
    struct layer *layer = snapshot_find(image, name, error);
    char *to = buffer;

    if (!layer)
        return -ENOENT;
    if (offset > layer->state_size || length > layer->state_size - offset)
        return error_set(error, -EINVAL, "%s: VM state of '%s' has %llu bytes only",
                         image->file.path, name, (unsigned long long)layer->state_size);
    while (length > 0) {
        uint64_t slab, in_slab = offset % PCOW_SLAB_SIZE;
        size_t piece = PCOW_SLAB_SIZE - in_slab < length ? PCOW_SLAB_SIZE - in_slab : length;
        int ret = find_piece(image, layer->id, offset >> SLAB_BITS, &slab);

        if (!ret)
            ret =
                slab ? file_read(&image->file, (slab << SLAB_BITS) + in_slab, to, piece) : -EBADMSG;
        if (ret)
            return error_set_errno(error, ret, "%s: cannot read VM state of '%s'", image->file.path,
                                   name);
        to += piece;
        offset += piece;
        length -= piece;
    }
    return 0;
}
