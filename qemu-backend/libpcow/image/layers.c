/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/image.h"
#include "image/spare.h"
#include "util/error.h"

struct layer *layer_find(const struct pcow_image *image, uint32_t id)
{
    size_t low = 0, high = image->layer_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (image->layers[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < image->layer_count && image->layers[low].id == id ? &image->layers[low] : NULL;
}

static void mark_slot(struct pcow_image *image, uint32_t slot, bool used)
{
    uint64_t bit = UINT64_C(1) << slot % 64;

    /* store_again.c looks at any time. */
    if (used)
        __atomic_fetch_or(&image->slot_used[slot / 64], bit, __ATOMIC_RELAXED);
    else
        __atomic_fetch_and(&image->slot_used[slot / 64], ~bit, __ATOMIC_RELAXED);
}

void layer_hold_slot(struct pcow_image *image, uint32_t slot)
{
    mark_slot(image, slot, true);
}

void layer_let_slot_go(struct pcow_image *image, uint32_t slot)
{
    mark_slot(image, slot, false);
}

void layer_move(struct pcow_image *image, struct layer *layer, uint32_t slot)
{
    mark_slot(image, layer->slot, false);
    layer->slot = slot;
    mark_slot(image, slot, true);
}

unsigned layer_children(const struct pcow_image *image, uint32_t id, uint32_t *only_child)
{
    unsigned count = 0;

    for (size_t i = 0; i < image->layer_count; i++)
        if (image->layers[i].parent == id) {
            count++;
            *only_child = image->layers[i].id;
        }
    return count;
}

bool layers_make_room(struct pcow_image *image)
{
    size_t capacity = image->layer_capacity ? image->layer_capacity * 2 : 16;
    struct layer *layers;

    if (image->layer_count < image->layer_capacity)
        return true;
    layers = realloc(image->layers, capacity * sizeof *layers);
    if (!layers)
        return false;
    image->layers = layers;
    image->layer_capacity = capacity;
    return true;
}

struct layer *layer_insert(struct pcow_image *image, const struct layer *layer)
{
    size_t at = image->layer_count;

    if (!layers_make_room(image))
        return NULL;
    while (at > 0 && image->layers[at - 1].id > layer->id)
        at--;
    memmove(&image->layers[at + 1], &image->layers[at], (image->layer_count - at) * sizeof *layer);
    image->layers[at] = *layer;
    image->layer_count++;
    mark_slot(image, layer->slot, true);
    return &image->layers[at];
}

void layer_remove(struct pcow_image *image, uint32_t id)
{
    struct layer *layer = layer_find(image, id);

    if (!layer)
        return;
    mark_slot(image, layer->slot, false);
    size_t at = (size_t)(layer - image->layers);

    image->layer_count--;
    memmove(layer, layer + 1, (image->layer_count - at) * sizeof *layer);
}

uint64_t layer_record_offset(const struct pcow_image *image, uint32_t slot)
{
    if (slot < LAYER_TABLE_0_SLOTS)
        return LAYER_TABLE_OFFSET + (uint64_t)slot * LAYER_RECORD_SIZE;
    slot -= LAYER_TABLE_0_SLOTS;

    uint32_t number = slot / LAYER_TABLE_SLOTS + 1;
    uint64_t slab = number <= MAX_LAYER_TABLE ? image->table[number] : 0;

    return slab ? (slab << SLAB_BITS) + (uint64_t)(slot % LAYER_TABLE_SLOTS) * LAYER_RECORD_SIZE
                : 0;
}

static void describe(const struct layer *layer, struct layer_record *record)
{
    record->date_seconds = layer->date_seconds;
    record->date_nanoseconds = layer->date_nanoseconds;
    memcpy(record->name, layer->name, sizeof record->name);
    record->crc = layer_record_crc(record);
}

int layer_write_description(struct pcow_image *image, const struct layer *layer,
                            struct pcow_error *error)
{
    const size_t from = offsetof(struct layer_record, date_seconds);
    struct layer_record record = {0};
    int ret;

    describe(layer, &record);
    ret = file_store_lazily(&image->file, layer_record_offset(image, layer->slot) + from,
                            (const char *)&record + from, sizeof record - from);
    return ret ? error_set_errno(error, ret, "%s: cannot write layer record %u", image->file.path,
                                 layer->slot)
               : 0;
}

static int store_word(struct pcow_image *image, const struct layer *layer, size_t field,
                      uint64_t value, bool lazily, struct pcow_error *error)
{
    int ret = file_store64(&image->file, layer_record_offset(image, layer->slot) + field,
                           word_encode(value), lazily);

    return ret ? error_set_errno(error, ret, "%s: cannot update layer %u", image->file.path,
                                 layer->id)
               : 0;
}

int layer_store_word(struct pcow_image *image, const struct layer *layer, size_t field,
                     uint64_t value, struct pcow_error *error)
{
    return store_word(image, layer, field, value, false, error);
}

static int store_state(struct pcow_image *image, const struct layer *layer, bool lazily,
                       struct pcow_error *error)
{
    return store_word(
        image, layer, offsetof(struct layer_record, state),
        word_value(layer_state_word(layer->id, layer->state, layer->flags, layer->sequence)),
        lazily, error);
}

int layer_store_state(struct pcow_image *image, const struct layer *layer, struct pcow_error *error)
{
    return store_state(image, layer, false, error);
}

int layer_store_state_lazily(struct pcow_image *image, const struct layer *layer,
                             struct pcow_error *error)
{
    return store_state(image, layer, true, error);
}

int layer_write_record(struct pcow_image *image, const struct layer *layer, bool lazily,
                       struct pcow_error *error)
{
    const size_t from = offsetof(struct layer_record, parent);
    uint64_t offset = layer_record_offset(image, layer->slot), state;
    struct layer_record record = {
        .parent = word_encode(layer->parent),
        .virtual_size = word_encode(layer->virtual_size),
        .parent_limit = word_encode(layer->parent_limit),
        .state_size = word_encode(layer->state_size),
    };
    int ret = file_read(&image->file, offset, &state, sizeof state);

    describe(layer, &record);
    /*
     * An interrupted operation may have left a record here that is not free, only dead. It must not
     * be read with half of the new fields: a parent that is younger than the layer makes an image
     * unusable.
     */
    if (!ret && word_value(state) >> 28 & 0xf)
        ret = file_store64(&image->file, offset, 0, false);
    /*
     * Nothing of this counts before the state does, so it may arrive in any order. Lazily even the
     * state may come before it: an open layer that nothing refers to counts for nothing, and what
     * the slot held before was a record of older ones, or zeros.
     */
    if (!ret)
        ret = (lazily ? file_store_lazily : file_store)(
            &image->file, offset + from, (const char *)&record + from, sizeof record - from);
    if (ret)
        return error_set_errno(error, ret, "%s: cannot write layer record %u", image->file.path,
                               layer->slot);
    return store_state(image, layer, lazily, error);
}

/* The first slot from one on that no layer alive uses; slots if all are taken. */
static uint32_t find_free_slot(const struct pcow_image *image, uint32_t from, uint32_t slots)
{
    while (from < slots) {
        uint64_t unused = ~image->slot_used[from / 64] >> from % 64;

        if (unused)
            return from + (uint32_t)__builtin_ctzll(unused) < slots
                       ? from + (uint32_t)__builtin_ctzll(unused)
                       : slots;
        from = (from / 64 + 1) * 64;
    }
    return slots;
}

/* A further layer table for slots that have no place yet. */
static int add_table(struct pcow_image *image, uint32_t number, struct pcow_error *error)
{
    struct owner owner = {.kind = OWNER_TABLE, .number = number};
    uint64_t slab;
    int ret = slab_take(image, &slab);

    if (!ret) {
        ret = slab_publish(image, slab, owner, false);
        if (ret)
            slab_untake(image, slab);
    }
    return ret ? error_set_errno(error, ret, "%s: cannot add a table for snapshots",
                                 image->file.path)
               : 0;
}

static int allocate_record(struct pcow_image *image, uint32_t slot, struct pcow_error *error)
{
    int ret;

    if (slot >= LAYER_TABLE_0_SLOTS && !layer_record_offset(image, slot)) {
        ret = add_table(image, (slot - LAYER_TABLE_0_SLOTS) / LAYER_TABLE_SLOTS + 1, error);
        if (ret)
            return ret;
    }
    ret = file_allocate_metadata(&image->file, layer_record_offset(image, slot), LAYER_RECORD_SIZE);
    return ret ? error_set_errno(
               error, ret, "%s: no space for the record of a snapshot; free space in the pool",
               image->file.path)
               : 0;
}

/* The first one from one on, which may be one that was never used. */
static uint32_t next_free_slot(const struct pcow_image *image, uint32_t from)
{
    uint32_t slots = (uint32_t)word_value(image->header.layer_slots);

    return from < slots ? find_free_slot(image, from, slots) : from;
}

int layer_allocate_spare(struct pcow_image *image, unsigned count)
{
    uint32_t slot = next_free_slot(image, 0);
    int ret = 0;

    for (; count > 0 && slot < MAX_LAYERS && layer_record_offset(image, slot) && !ret; count--) {
        ret = allocate_record(image, slot, NULL);
        slot = next_free_slot(image, slot + 1);
    }
    return ret;
}

int layer_reserve(struct pcow_image *image, bool keep_spare, bool lazily, uint32_t *id,
                  uint32_t *slot, struct pcow_error *error)
{
    uint64_t next = word_value(image->header.next_layer_id);
    uint32_t slots = (uint32_t)word_value(image->header.layer_slots);
    int (*store)(struct pcow_image *, size_t, uint64_t, struct pcow_error *) =
        lazily ? header_store_word_lazily : header_store_word;
    uint32_t candidate, spare;
    int ret;

    if (next > MAX_LAYER_ID)
        return error_set(
            error, -ENOSPC,
            "%s: all %u layer ids were used; pcow-img convert makes a copy that starts anew",
            image->file.path, MAX_LAYER_ID);
    candidate = find_free_slot(image, 0, slots);
    if (candidate >= MAX_LAYERS)
        return error_set(error, -ENOSPC,
                         "%s: has %u snapshots, the most an image can have; delete some",
                         image->file.path, MAX_LAYERS);
    ret = allocate_record(image, candidate, error);
    spare = next_free_slot(image, candidate + 1);
    if (!ret && keep_spare && spare < MAX_LAYERS) {
        ret = allocate_record(image, spare, error);
        /* The last snapshot need leave none: the guest stores nothing that a revert would drop. */
        if (ret == -ENOSPC && spare_is_in_use(image))
            ret = 0;
    }
    if (ret)
        return ret;
    spare_note_records(image);
    /* Only now: what a full pool refuses is no change, and images on this one still open. */
    ret = image_begin_change(image, error);
    if (ret)
        return ret;
    if (candidate == slots) {
        /* What lies in a slot that was never used is zero, i.e. free; make it count only now. */
        ret = store(image, offsetof(struct header, layer_slots), slots + 1, error);
        if (ret)
            return ret;
    }
    ret = store(image, offsetof(struct header, next_layer_id), next + 1, error);
    if (ret)
        return ret;
    *id = (uint32_t)next;
    *slot = candidate;
    return 0;
}
