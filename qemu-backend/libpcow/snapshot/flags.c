/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/flags.h"

#include <errno.h>

#include "image/lock.h"
#include "image/mirror.h"
#include "image/store.h"
#include "util/error.h"

static int read_state(const struct pcow_image *image, const struct file *file,
                      const struct layer *layer, uint64_t *word, struct pcow_error *error)
{
    int ret = file_read(file, layer_record_offset(image, layer->slot), word, sizeof *word);

    return ret ? error_set_errno(error, ret, "cannot read the snapshots of %s", file->path) : 0;
}

int flags_refresh(const struct pcow_image *image, struct layer *layer, struct pcow_error *error)
{
    uint64_t word;
    int ret = read_state(image, &image->file, layer, &word, error);

    if (!ret && word_is_valid(word) && (word_value(word) & MAX_LAYER_ID) == layer->id)
        layer->flags = (unsigned)(word_value(word) >> 32 & 0xff);
    return ret;
}

/* The record must still be that of the layer: it moves when the snapshot is renamed. */
static int change(const struct pcow_image *image, struct file *file, const struct layer *layer,
                  unsigned set, unsigned clear, struct pcow_error *error)
{
    uint64_t offset = layer_record_offset(image, layer->slot), word, value;
    int ret = read_state(image, file, layer, &word, error);
    unsigned flags;

    if (ret)
        return ret;
    value = word_value(word);
    flags = (unsigned)(value >> 32 & 0xff);
    if (!word_is_valid(word) || (value & MAX_LAYER_ID) != layer->id
        || (value >> 28 & 0xf) != LAYER_SNAPSHOT)
        return error_set(error, -EBUSY, "%s: snapshot '%s' was renamed just now; try again",
                         file->path, layer->name);
    if ((flags | set) == flags && (flags & clear) == 0)
        return 0;
    word = layer_state_word(layer->id, LAYER_SNAPSHOT, (flags | set) & ~clear,
                            (unsigned)(value >> 40));
    ret = file_store64(file, offset, word, false);
    return ret ? error_set_errno(error, ret, "%s: cannot mark snapshot '%s'", file->path,
                                 layer->name)
               : 0;
}

/*
 * Who has nobody else that brings the mirror up to date does it: the page would stay without a
 * checksum until the next writer, of a template for ever. A writer that comes now waits for the tree
 * before it stores anything. was_settled: what else is stale in the group is not of this mark, and
 * is left to be judged.
 */
static void sync_mirror(struct file *file, bool was_settled)
{
    if (was_settled && !file_has_writer(file))
        mirror_sync_alone(file, NULL);
}

int flags_change(const struct pcow_image *image, struct file *file, const struct layer *layer,
                 unsigned set, unsigned clear, struct pcow_error *error)
{
    bool settled = mirror_is_settled(file, layer_record_offset(image, layer->slot));
    int ret = change(image, file, layer, set, clear, error);

    if (!ret)
        sync_mirror(file, settled);
    return ret;
}
