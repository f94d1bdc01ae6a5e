/* SPDX-License-Identifier: BSD-3-Clause */
/* The layer records of a file: which of them count. "Which layers are alive" in format.rst. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/image.h"
#include "util/error.h"

int layer_decode(const struct pcow_image *image, const struct layer_record *record, uint32_t slot,
                 struct layer *layer, struct pcow_error *error)
{
    const uint64_t words[] = {record->state, record->parent, record->virtual_size,
                              record->parent_limit, record->state_size};
    uint64_t state = word_value(record->state);

    memset(layer, 0, sizeof *layer);
    if (record->state == 0)
        return 0;
    for (unsigned i = 0; i < sizeof words / sizeof words[0]; i++)
        if (!word_is_valid(words[i]))
            return error_set(error, -EBADMSG,
                             "%s: layer record %u is damaged (word %u); see pcow-img check",
                             image->file.path, slot, i);
    layer->id = (uint32_t)state & MAX_LAYER_ID;
    layer->state = (enum layer_state)(state >> 28 & 0xf);
    layer->flags = (unsigned)(state >> 32 & 0xff);
    layer->sequence = (unsigned)(state >> 40 & 0xff);
    layer->slot = slot;
    layer->parent = (uint32_t)word_value(record->parent);
    layer->virtual_size = word_value(record->virtual_size);
    layer->parent_limit = word_value(record->parent_limit);
    layer->state_size = word_value(record->state_size);
    layer->date_seconds = record->date_seconds;
    layer->date_nanoseconds = record->date_nanoseconds;
    memcpy(layer->name, record->name, sizeof layer->name);
    if (layer->state == LAYER_FREE)
        return 0;
    if (layer->state > LAYER_HIDDEN || layer->id == 0 || layer->parent >= layer->id
        || layer->virtual_size % PCOW_SLAB_SIZE || layer->virtual_size > PCOW_MAX_VIRTUAL_SIZE
        || layer->parent_limit % PCOW_SLAB_SIZE || layer->state_size > PCOW_MAX_VIRTUAL_SIZE)
        return error_set(error, -EBADMSG,
                         "%s: layer record %u is impossible (id %u, parent %u, size %llu); "
                         "see pcow-img check",
                         image->file.path, slot, layer->id, layer->parent,
                         (unsigned long long)layer->virtual_size);
    if (layer->state != LAYER_OPEN
        && (record->crc != layer_record_crc(record)
            || !snapshot_name_is_valid(layer->name, sizeof layer->name)))
        return error_set(error, -EBADMSG, "%s: the name of layer %u is damaged; see pcow-img check",
                         image->file.path, layer->id);
    layer->name[sizeof layer->name - 1] = 0;
    return 0;
}

/*
 * Drop what is not alive: open layers that are neither active nor the active one's parent (an
 * interrupted operation).
 */
static void keep_alive(struct pcow_image *image)
{
    uint32_t active = image_active(image);
    struct layer *top = layer_find(image, active);
    uint32_t parent = top ? top->parent : 0;
    size_t kept = 0;

    for (size_t i = 0; i < image->layer_count; i++) {
        struct layer *layer = &image->layers[i];

        if (layer->state != LAYER_OPEN || layer->id == active || layer->id == parent)
            image->layers[kept++] = *layer;
    }
    image->layer_count = kept;
}

static int by_id(const void *left, const void *right)
{
    const struct layer *a = left, *b = right;

    if (a->id != b->id)
        return a->id < b->id ? -1 : 1;
    return a->slot < b->slot ? -1 : a->slot > b->slot;
}

/*
 * By id. Two records of one layer are an interrupted rename: the one with the higher sequence
 * counts, the other is remembered.
 */
static void sort_layers(struct pcow_image *image)
{
    size_t kept = 0;

    if (image->layer_count)
        qsort(image->layers, image->layer_count, sizeof *image->layers, by_id);
    for (size_t i = 0; i < image->layer_count; i++) {
        struct layer *last = kept ? &image->layers[kept - 1] : NULL, *layer = &image->layers[i];

        if (!last || last->id != layer->id) {
            image->layers[kept++] = *layer;
        } else if ((uint8_t)(layer->sequence - last->sequence) < 128) {
            image->stale_record = last->slot + 1;
            *last = *layer;
        } else {
            image->stale_record = layer->slot + 1;
        }
    }
    image->layer_count = kept;
}

#define BATCH 256u                     /* divides the number of slots of every table */

/* The records from slot on, a multiple of BATCH. */
static int read_batch(const struct pcow_image *image, uint32_t slot, struct layer_record *records,
                      struct pcow_error *error)
{
    uint64_t offset = layer_record_offset(image, slot);
    int ret = offset ? file_read(&image->file, offset, records, BATCH * sizeof *records) : -ENODATA;

    if (ret == -ENODATA)
        ret = -EBADMSG;
    return ret ? error_set_errno(error, ret, "%s: cannot read layer record %u", image->file.path,
                                 slot)
               : 0;
}

/* All records; -EBADMSG if one cannot be used. */
static int read_records(struct pcow_image *image, uint32_t slots, struct pcow_error *error)
{
    struct layer_record *records = malloc(BATCH * sizeof *records);
    int ret = records ? 0 : error_set(error, -ENOMEM, "out of memory");

    for (uint32_t slot = 0; slot < slots && ret == 0; slot++) {
        struct layer layer;

        if (slot % BATCH == 0 && (ret = read_batch(image, slot, records, error)))
            break;
        ret = layer_decode(image, &records[slot % BATCH], slot, &layer, error);
        if (!ret && layer.state == LAYER_FREE)
            image->freed_records |= layer.id != 0;
        if (ret || layer.state == LAYER_FREE)
            continue;
        if (layer.id >= word_value(image->header.next_layer_id))
            ret = error_set(error, -EBADMSG,
                            "%s: layer %u has an id that was never given out; see pcow-img check",
                            image->file.path, layer.id);
        else if (!layers_make_room(image))
            ret = error_set(error, -ENOMEM, "out of memory");
        else
            image->layers[image->layer_count++] = layer;    /* sort_layers() brings them in order */
    }
    free(records);
    return ret;
}

int layers_load(struct pcow_image *image, struct pcow_error *error)
{
    uint64_t slots = word_value(image->header.layer_slots),
             active = word_value(image->header.active_layer);
    int ret;

    if (slots == 0 || slots > MAX_LAYERS || active > MAX_LAYER_ID
        || word_value(image->header.next_layer_id) > MAX_LAYER_ID + 1)
        return error_set(error, -EBADMSG,
                         "%s: the header has impossible counts of layers; see pcow-img check",
                         image->file.path);
    ret = read_records(image, (uint32_t)slots, error);
    if (ret)
        return ret;
    sort_layers(image);
    keep_alive(image);
    for (size_t i = 0; i < image->layer_count; i++)
        layer_hold_slot(image, image->layers[i].slot);
    if (!layer_find(image, image_active(image)))
        return error_set(error, -EBADMSG,
                         "%s: the active layer %u has no record; see pcow-img check",
                         image->file.path, image_active(image));
    for (size_t i = 0; i < image->layer_count; i++) {
        struct layer *layer = &image->layers[i];

        if (layer->parent
            && (!layer_find(image, layer->parent) || layer->parent == image_active(image)))
            return error_set(error, -EBADMSG,
                             "%s: layer %u has lost its parent %u; see pcow-img check",
                             image->file.path, layer->id, layer->parent);
        if (layer->id == image_active(image))
            layer->state = LAYER_OPEN;
        else if (layer->state == LAYER_OPEN)
            /* Parent of the active layer: of a snapshot that was not whole, see making.h. */
            layer->state = LAYER_HIDDEN;
    }
    return 0;
}

/* ---- slabs of layers that are not alive ------------------------------------------------------ */

static bool has_unknown_owner(const struct pcow_image *image, uint64_t slab)
{
    const struct slab *owner = &image->slabs[slab];

    return (owner->kind == OWNER_DATA || owner->kind == OWNER_STATE)
           && !layer_find(image, owner->layer);
}

static int compare_ids(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;

    return a < b ? -1 : a > b;
}

/* The ids in all records, whatever their state; the caller frees them. */
static int read_ids(const struct pcow_image *image, uint32_t **ids, size_t *count,
                    struct pcow_error *error)
{
    uint32_t slots = (uint32_t)word_value(image->header.layer_slots);
    struct layer_record *records = malloc(BATCH * sizeof *records);
    int ret = 0;

    *count = 0;
    *ids = malloc(slots * sizeof **ids);
    if (!*ids || !records)
        ret = error_set(error, -ENOMEM, "out of memory");
    for (uint32_t slot = 0; slot < slots && ret == 0; slot++) {
        if (slot % BATCH == 0 && (ret = read_batch(image, slot, records, error)))
            break;
        if (records[slot % BATCH].state)
            (*ids)[(*count)++] = (uint32_t)word_value(records[slot % BATCH].state) & MAX_LAYER_ID;
    }
    free(records);
    if (!ret)
        qsort(*ids, *count, sizeof **ids, compare_ids);
    return ret;
}

int layers_clear_outdated(struct pcow_image *image, struct pcow_error *error)
{
    uint32_t slots = (uint32_t)word_value(image->header.layer_slots);
    struct layer_record *records;
    int ret = 0;

    if (!image->freed_records)
        return 0;
    records = malloc(BATCH * sizeof *records);
    if (!records)
        return error_set(error, -ENOMEM, "out of memory");
    for (uint32_t slot = 0; slot < slots && ret == 0; slot++) {
        const struct layer *layer;
        uint64_t state;

        if (slot % BATCH == 0 && (ret = read_batch(image, slot, records, error)))
            break;
        state = word_value(records[slot % BATCH].state);
        layer = state & MAX_LAYER_ID && (state >> 28 & 0xf) == LAYER_FREE
                    ? layer_find(image, (uint32_t)state & MAX_LAYER_ID)
                    : NULL;
        if (layer && layer->slot != slot
            && (ret = file_store64(&image->file, layer_record_offset(image, slot), 0, false)))
            error_set_errno(error, ret, "%s: cannot clear layer record %u", image->file.path, slot);
    }
    free(records);
    return ret;
}

int layers_check_owners(const struct pcow_image *image, struct pcow_error *error)
{
    uint64_t count = image_slab_count(image), slab = 1;
    uint32_t *ids = NULL;
    size_t id_count;
    int ret;

    while (slab < count && !has_unknown_owner(image, slab))
        slab++;
    if (slab >= count)
        return 0;
    ret = read_ids(image, &ids, &id_count, error);
    for (; slab < count && ret == 0; slab++)
        if (has_unknown_owner(image, slab)
            && !bsearch(&image->slabs[slab].layer, ids, id_count, sizeof *ids, compare_ids))
            ret = error_set(error, -EBADMSG,
                            "%s: file slab %llu belongs to layer %u, which has no record, not even "
                            "of its deletion: a "
                            "snapshot whose record is lost; bring it back with pcow-img check -r "
                            "all before the image is written to",
                            image->file.path, (unsigned long long)slab, image->slabs[slab].layer);
    free(ids);
    return ret;
}
