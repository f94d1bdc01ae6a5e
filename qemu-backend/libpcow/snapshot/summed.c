/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/summed.h"

#include <errno.h>
#include <stdlib.h>

#include "image/datasum.h"
#include "image/lock.h"
#include "snapshot/flags.h"
#include "util/error.h"

#define WORDS_AT_ONCE 512u

bool summed_is_set(const struct pcow_image *image, const struct layer *layer)
{
    uint64_t offset = layer_record_offset(image, layer->slot), word, value;

    if (!offset || file_read(&image->file, offset, &word, sizeof word) || !word_is_valid(word))
        return false;
    value = word_value(word);
    return (value & MAX_LAYER_ID) == layer->id
           && ((value >> 28 & 0xf) == LAYER_SNAPSHOT || (value >> 28 & 0xf) == LAYER_HIDDEN)
           && value >> 32 & LAYER_SUMMED;
}

static bool is_frozen(const struct pcow_image *image, const struct layer *layer)
{
    return layer->id != image_active(image)
           && (layer->state == LAYER_SNAPSHOT || layer->state == LAYER_HIDDEN);
}

/*
 * Of the layers that are wanted and frozen, those of which no slab lacks its checksum; by the tables
 * in the file, as others may have changed them. NULL with *error set.
 */
static bool *find_summed(const struct pcow_image *image, const struct file *file,
                         const bool *wanted, struct pcow_error *error)
{
    uint64_t count = file->size >> SLAB_BITS, words[WORDS_AT_ONCE], entry;
    bool *summed = calloc(image->layer_count + 1, sizeof *summed);
    int ret = 0;

    if (!summed) {
        error_set(error, -ENOMEM, "out of memory");
        return NULL;
    }
    for (size_t i = 0; i < image->layer_count; i++)
        summed[i] = (!wanted || wanted[i]) && is_frozen(image, &image->layers[i]);
    for (uint64_t p = 0; p < count && !ret; p += WORDS_AT_ONCE) {
        uint64_t n = count - p < WORDS_AT_ONCE ? count - p : WORDS_AT_ONCE;

        ret = file_read(file, owner_offset(p), words, n * sizeof *words);
        for (uint64_t i = 0; i < n && !ret; i++) {
            struct owner owner = owner_decode(words[i]);
            const struct layer *layer =
                owner.kind == OWNER_DATA ? layer_find(image, owner.layer) : NULL;

            if (!layer || !summed[layer - image->layers])
                continue;
            ret = file_read(file, datasum_offset(p + i), &entry, sizeof entry);
            if (!ret && !entry)
                summed[layer - image->layers] = false;
        }
    }
    if (ret) {
        error_set_errno(error, ret, "cannot read the checksums of %s", file->path);
        free(summed);
        return NULL;
    }
    return summed;
}

static int note(struct pcow_image *image, struct layer *layer, struct pcow_error *error)
{
    int ret = flags_refresh(image, layer, error);

    if (ret || layer->flags & LAYER_SUMMED)
        return ret;
    layer->flags |= LAYER_SUMMED;
    return layer_store_state(image, layer, error);
}

int summed_note(struct pcow_image *image, const bool *wanted, struct pcow_error *error)
{
    int ret = lock_tree(&image->file, true, error);
    bool *summed;

    if (ret)
        return ret;
    summed = find_summed(image, &image->file, wanted, error);
    for (size_t i = 0; summed && i < image->layer_count && !ret; i++)
        if (summed[i])
            ret = note(image, &image->layers[i], error);
    unlock_tree(&image->file);
    ret = summed ? ret : -EIO;
    free(summed);
    return ret;
}

int summed_note_beside_writer(const struct pcow_image *image, struct file *file,
                              const bool *wanted, struct pcow_error *error)
{
    bool *summed = find_summed(image, file, wanted, error);
    int ret = summed ? 0 : -EIO;

    for (size_t i = 0; summed && i < image->layer_count && !ret; i++) {
        if (summed[i] && image->layers[i].state == LAYER_SNAPSHOT)
            ret = flags_change(image, file, &image->layers[i], LAYER_SUMMED, 0, error);
        /* It has been renamed, or deleted, since the image was opened. */
        if (ret == -EBUSY)
            ret = 0;
    }
    free(summed);
    return ret;
}

int summed_clear(struct pcow_image *image, struct layer *layer, struct pcow_error *error)
{
    if (!summed_is_set(image, layer)) {
        layer->flags &= ~(unsigned)LAYER_SUMMED;
        return 0;
    }

    int ret = flags_refresh(image, layer, error);

    if (ret)
        return ret;
    layer->flags &= ~(unsigned)LAYER_SUMMED;
    return layer_store_state(image, layer, error);
}
