/* SPDX-License-Identifier: BSD-3-Clause */
#include "image/known.h"

#include <errno.h>
#include <string.h>

#define RECORDS_PER_PAGE (PCOW_PAGE_SIZE / LAYER_RECORD_SIZE)

/* ---- header ---------------------------------------------------------------------------------- */

static int put_header(const struct pcow_image *image, void *content)
{
    /* Whoever overwrites our memory shall not have it taken for what was stored. */
    if (header_validate(&image->header, image->file.path, NULL))
        return -EIO;
    memcpy(content, &image->header, sizeof image->header);
    return 0;
}

static void put_header_copy(const struct pcow_image *image, void *content)
{
    if (image->header_copied)
        memcpy(content, &image->header_copy, sizeof image->header_copy);
}

/* ---- slabs ----------------------------------------------------------------------------------- */

static struct slab owner_of(const struct pcow_image *image, uint64_t slab)
{
    return slab < image_slab_count(image) ? slab_peek(image, slab) : (struct slab){0};
}

static int put_owners(const struct pcow_image *image, uint64_t first, uint64_t *words)
{
    for (uint64_t i = 0; i < PCOW_PAGE_SIZE / sizeof *words; i++) {
        const struct slab slab = owner_of(image, first + i);

        if (slab.layer > MAX_LAYER_ID || slab.number >> OWNER_NUMBER_BITS
            || (slab.kind == OWNER_NONE && slab.layer))
            return -EIO;
        words[i] = owner_encode(
            (struct owner){(enum owner_kind)slab.kind, slab.layer, slab.number});
    }
    return 0;
}

/* A set of pages wants to be aligned to a line, and the content of a page need not be. */
static void put_bitmaps(const struct pcow_image *image, uint64_t first, uint8_t *content)
{
    for (uint64_t i = 0; i < SLABS_PER_TABLE_PAGE; i++) {
        bool data = owner_of(image, first + i).kind == OWNER_DATA;

        for (unsigned w = 0; data && w < PAGE_SET_WORDS; w++) {
            uint64_t word = page_set_word(&image->valid[first + i], w);

            memcpy(content + i * sizeof *image->valid + w * sizeof word, &word, sizeof word);
        }
    }
}

/* ---- layers ---------------------------------------------------------------------------------- */

static unsigned state_in(uint64_t word)
{
    return (unsigned)(word_value(word) >> 28 & 0xf);
}

static uint32_t id_in(uint64_t word)
{
    return (uint32_t)word_value(word) & MAX_LAYER_ID;
}

static unsigned sequence_in(uint64_t word)
{
    return (unsigned)(word_value(word) >> 40 & 0xff);
}

static bool is_active(const struct pcow_image *image, const struct layer *layer)
{
    return layer->id == image_active(image);
}

/* Of a layer that is alive. */
static bool state_fits(const struct pcow_image *image, const struct layer *layer, uint64_t word)
{
    unsigned state = state_in(word);

    if (!word_is_valid(word) || id_in(word) != layer->id || sequence_in(word) != layer->sequence)
        return false;
    /* Of the active one it is not looked at; and of one that becomes a snapshot it is not final. */
    if (is_active(image, layer)
        || (image->making.step >= MAKING_FROZEN && image->making.layer == layer->id))
        return state != LAYER_FREE && state <= LAYER_HIDDEN;
    return state == layer->state;
}

static bool description_fits(const struct layer *layer, const struct layer_record *record)
{
    return record->crc == layer_record_crc(record) && record->date_seconds == layer->date_seconds
           && record->date_nanoseconds == layer->date_nanoseconds
           /* Memory ends it where it must end, and what lies behind its end says nothing. */
           && strncmp(record->name, layer->name, sizeof record->name - 1) == 0;
}

/* Those of the active layer are not looked at by anybody. */
static bool fits(const struct pcow_image *image, const struct layer *layer,
                 const struct layer_record *record)
{
    return state_fits(image, layer, record->state)
           && record->parent == word_encode(layer->parent)
           && record->virtual_size == word_encode(layer->virtual_size)
           && record->parent_limit == word_encode(layer->parent_limit)
           && record->state_size == word_encode(layer->state_size)
           && (is_active(image, layer) || description_fits(layer, record));
}

/*
 * Who makes an image on a snapshot pins it in the file alone: so a record that is believed tells
 * the flags, and in the place of another one the snapshot is taken for pinned, as by check.
 */
static void put_record(const struct layer *layer, struct layer_record *record)
{
    unsigned flags = layer->flags | (layer->state == LAYER_SNAPSHOT ? LAYER_PINNED : 0u);

    *record = (struct layer_record){
        .state = layer_state_word(layer->id, layer->state, flags, layer->sequence),
        .parent = word_encode(layer->parent),
        .virtual_size = word_encode(layer->virtual_size),
        .parent_limit = word_encode(layer->parent_limit),
        .state_size = word_encode(layer->state_size),
        .date_seconds = layer->date_seconds,
        .date_nanoseconds = layer->date_nanoseconds,
    };
    memcpy(record->name, layer->name, sizeof record->name);
    record->crc = layer_record_crc(record);
}

/*
 * In a slot of no layer: would who opens the image take it for none, either? What it says otherwise
 * is not known.
 */
static bool is_dead(const struct pcow_image *image, const struct layer_record *record,
                    uint32_t slot)
{
    const struct layer *active = layer_find(image, image_active(image)), *alive;
    struct layer layer;

    /* One that was never used is looked at by nobody. */
    if (slot >= word_value(image->header.layer_slots))
        return true;
    if (layer_decode(image, record, slot, &layer, NULL))
        return false;
    if (layer.state == LAYER_FREE)
        return true;
    if (layer.id >= word_value(image->header.next_layer_id))
        return false;
    /* An older record of the same layer is what a rename leaves. */
    alive = layer_find(image, layer.id);
    if (alive)
        return alive->sequence != layer.sequence
               && (uint8_t)(alive->sequence - layer.sequence) < 128;
    return layer.state == LAYER_OPEN && layer.id != active->parent;
}

static int put_records(const struct pcow_image *image, uint32_t first,
                       struct layer_record *records)
{
    const struct layer *of[RECORDS_PER_PAGE] = {NULL};

    if (!layer_find(image, image_active(image)))
        return -EIO;
    for (size_t i = 0; i < image->layer_count; i++)
        if (image->layers[i].slot - first < RECORDS_PER_PAGE)
            of[image->layers[i].slot - first] = &image->layers[i];
    for (uint32_t i = 0; i < RECORDS_PER_PAGE; i++) {
        if (of[i] && (of[i]->id == 0 || of[i]->parent >= of[i]->id))
            return -EIO;
        if (of[i] && !fits(image, of[i], &records[i]))
            put_record(of[i], &records[i]);
        if (!of[i] && !is_dead(image, &records[i], first + i))
            memset(&records[i], 0, sizeof records[i]);
    }
    return 0;
}

int known_page(const void *opaque, uint64_t group, unsigned page, void *content)
{
    const struct pcow_image *image = opaque;
    uint64_t offset = page * PCOW_PAGE_SIZE, first = group * SLABS_PER_GROUP;
    int ret = 0;

    if (offset >= BITMAP_OFFSET)
        put_bitmaps(image, first + (offset - BITMAP_OFFSET) / sizeof(struct page_set), content);
    else if (offset < LAYER_TABLE_OFFSET && offset >= SLAB_TABLE_OFFSET)
        ret = put_owners(image, first + (offset - SLAB_TABLE_OFFSET) / sizeof(uint64_t), content);
    else if (group)
        return 0;                      /* no other group has any */
    else if (offset >= LAYER_TABLE_OFFSET)
        ret = put_records(image, (uint32_t)((offset - LAYER_TABLE_OFFSET) / LAYER_RECORD_SIZE),
                          content);
    else if (page == 0)
        ret = put_header(image, content);
    else
        put_header_copy(image, content);
    return ret;
}
