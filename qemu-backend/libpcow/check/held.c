/* SPDX-License-Identifier: BSD-3-Clause */
#include "check/held.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define WORDS (PCOW_PAGE_SIZE / sizeof(uint64_t))
#define BITMAPS (PCOW_PAGE_SIZE / sizeof(struct page_set))
#define RECORDS (PCOW_PAGE_SIZE / LAYER_RECORD_SIZE)

/* A text of ranges that ends where the room does. */
struct text {
    const char *begin;
    char *at;
    size_t left;
    unsigned more;                     /* that had no room */
    /* the range that is being collected */
    enum owner_kind kind;
    uint32_t layer;
    uint64_t first, end;               /* slabs of guest or VM state, or layer tables */
};

static void __attribute__((format(printf, 2, 3))) add(struct text *text, const char *format, ...)
{
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(text->at, text->left, format, args);
    va_end(args);
    /* What is cut off is not there at all. */
    if (length < 0 || (size_t)length + 40 > text->left) {
        *text->at = 0;
        text->more++;
        return;
    }
    text->at += length;
    text->left -= (size_t)length;
}

/* A layer as people know it. check_read() has what the mirror says of a damaged record. */
static void name_layer(struct check *check, uint32_t id, char *name, size_t size)
{
    struct layer_record records[RECORDS];
    uint64_t active = 0, slots = 0;

    snprintf(name, size, "layer %u", id);
    if (check_read(check, offsetof(struct header, active_layer), &active, sizeof active)
        || check_read(check, offsetof(struct header, layer_slots), &slots, sizeof slots))
        return;
    if (word_is_valid(active) && word_value(active) == id) {
        snprintf(name, size, "the active layer");
        return;
    }
    slots = word_is_valid(slots) && word_value(slots) < LAYER_TABLE_0_SLOTS ? word_value(slots)
                                                                            : LAYER_TABLE_0_SLOTS;
    for (uint64_t slot = 0; slot < slots; slot += RECORDS) {
        if (check_read(check, LAYER_TABLE_OFFSET + slot * LAYER_RECORD_SIZE, records,
                       sizeof records))
            return;
        for (unsigned i = 0; i < RECORDS; i++) {
            uint64_t value = word_value(records[i].state);

            if (word_is_valid(records[i].state) && (value & MAX_LAYER_ID) == id
                && (value >> 28 & 0xf) == LAYER_SNAPSHOT
                && snapshot_name_is_valid(records[i].name, sizeof records[i].name))
                snprintf(name, size, "snapshot '%s'", records[i].name);
        }
    }
}

static void end_range(struct check *check, struct text *text)
{
    char name[PCOW_SNAPSHOT_NAME_SIZE + 16];
    const char *separator = text->at == text->begin ? "" : ", ";

    if (text->end > text->first && text->kind == OWNER_TABLE) {
        add(text, "%srecords of snapshots", separator);
    } else if (text->end > text->first) {
        name_layer(check, text->layer, name, sizeof name);
        add(text, "%s%s bytes %" PRIu64 " to %" PRIu64 " of %s", separator,
            text->kind == OWNER_STATE ? "VM state" : "guest", text->first << SLAB_BITS,
            (text->end << SLAB_BITS) - 1, name);
    }
    text->first = text->end = 0;
}

static void add_slab(struct check *check, struct text *text, struct owner owner)
{
    if (text->end > text->first && owner.kind == text->kind && owner.layer == text->layer
        && owner.number == text->end) {
        text->end++;
        return;
    }
    end_range(check, text);
    text->kind = owner.kind;
    text->layer = owner.layer;
    text->first = owner.number;
    text->end = text->first + 1;
}

/* count owner words from that of a file slab on. */
static int add_slabs(struct check *check, struct text *text, uint64_t slab, unsigned count)
{
    uint64_t words[WORDS];
    int ret = check_read(check, owner_offset(slab), words, count * sizeof *words);

    for (unsigned i = 0; i < count && !ret; i++) {
        struct owner owner = owner_decode(words[i]);

        if (word_is_valid(words[i]) && owner.kind != OWNER_NONE)
            add_slab(check, text, owner);
    }
    end_range(check, text);
    return ret;
}

static int add_records(struct check *check, struct text *text, uint64_t offset)
{
    struct layer_record records[RECORDS];
    int ret = check_read(check, offset, records, sizeof records);

    for (unsigned i = 0; i < RECORDS && !ret; i++) {
        uint64_t value = word_value(records[i].state);
        uint32_t id = (uint32_t)value & MAX_LAYER_ID;
        const char *name = records[i].name, *separator = text->at == text->begin ? "" : ", ";

        if (!word_is_valid(records[i].state) || !id || (value >> 28 & 0xf) == LAYER_FREE)
            continue;
        if ((value >> 28 & 0xf) == LAYER_SNAPSHOT
            && snapshot_name_is_valid(name, sizeof records[i].name))
            add(text, "%ssnapshot '%s'", separator, name);
        else
            add(text, "%slayer %u", separator, id);
    }
    return ret;
}

int held_by_page(struct check *check, uint64_t group, unsigned page, char *string, size_t size)
{
    struct text text = {.begin = string, .at = string, .left = size};
    uint64_t offset = (uint64_t)page * PCOW_PAGE_SIZE, first = group * SLABS_PER_GROUP;
    int ret = 0;

    *string = 0;
    if (offset >= BITMAP_OFFSET)
        ret = add_slabs(check, &text, first + (offset - BITMAP_OFFSET) / sizeof(struct page_set),
                        BITMAPS);
    else if (offset >= LAYER_TABLE_OFFSET && group == 0)
        ret = add_records(check, &text, offset);
    else if (offset >= SLAB_TABLE_OFFSET && offset < LAYER_TABLE_OFFSET)
        ret = add_slabs(check, &text, first + (offset - SLAB_TABLE_OFFSET) / sizeof(uint64_t),
                        WORDS);
    if (text.more)
        snprintf(text.at, text.left, ", and %u more", text.more);
    return ret;
}
