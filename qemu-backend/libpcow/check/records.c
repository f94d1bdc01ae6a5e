/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Layer records: all slots are read, also those that layer_slots does not count, because that
 * number may be wrong.
 */
#include "check/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/error.h"

#define BATCH 256u

struct check_layer *check_find_layer(const struct check *check, uint32_t id)
{
    size_t low = 0, high = check->layer_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (check->layers[middle].layer.id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < check->layer_count && check->layers[low].layer.id == id ? &check->layers[low]
                                                                         : NULL;
}

int check_add_layer(struct check *check, const struct check_layer *layer)
{
    if (check->layer_count == check->layer_capacity) {
        size_t capacity = check->layer_capacity ? check->layer_capacity * 2 : 16;
        struct check_layer *grown = realloc(check->layers, capacity * sizeof *grown);

        if (!grown)
            return error_set(check->error, -ENOMEM, "out of memory for the layers of %s",
                             check->file.path);
        check->layers = grown;
        check->layer_capacity = capacity;
    }
    check->layers[check->layer_count++] = *layer;
    return 0;
}

static int compare_layers(const void *left, const void *right)
{
    const struct layer *a = &((const struct check_layer *)left)->layer,
                       *b = &((const struct check_layer *)right)->layer;

    if (a->id != b->id)
        return a->id < b->id ? -1 : 1;
    return a->slot < b->slot ? -1 : a->slot > b->slot;
}

void check_sort_layers(struct check *check)
{
    if (check->layer_count)
        qsort(check->layers, check->layer_count, sizeof *check->layers, compare_layers);
}

uint64_t check_record_offset(const struct check *check, uint32_t slot)
{
    uint32_t table;

    if (slot < LAYER_TABLE_0_SLOTS)
        return LAYER_TABLE_OFFSET + (uint64_t)slot * LAYER_RECORD_SIZE;
    slot -= LAYER_TABLE_0_SLOTS;
    table = slot / LAYER_TABLE_SLOTS + 1;
    if (table > CHECK_MAX_TABLE || !check->table[table])
        return 0;
    return (check->table[table] << SLAB_BITS)
           + (uint64_t)(slot % LAYER_TABLE_SLOTS) * LAYER_RECORD_SIZE;
}

unsigned check_decode(const struct layer_record *record, uint32_t slot, struct layer *layer)
{
    uint64_t state = word_value(record->state), size = word_value(record->virtual_size),
             limit = word_value(record->parent_limit);
    unsigned damage = 0;

    memset(layer, 0, sizeof *layer);
    layer->id = (uint32_t)state & MAX_LAYER_ID;
    layer->state = (enum layer_state)(state >> 28 & 0xf);
    layer->flags = (unsigned)(state >> 32 & 0xff);
    layer->sequence = (unsigned)(state >> 40 & 0xff);
    layer->slot = slot;
    if (!word_is_valid(record->parent) || word_value(record->parent) >= layer->id)
        damage |= DAMAGED_PARENT;
    else
        layer->parent = (uint32_t)word_value(record->parent);
    if (!word_is_valid(record->virtual_size) || size == 0 || size % PCOW_SLAB_SIZE
        || size > PCOW_MAX_VIRTUAL_SIZE)
        damage |= DAMAGED_SIZE;
    else
        layer->virtual_size = size;
    if (!word_is_valid(record->parent_limit) || limit % PCOW_SLAB_SIZE
        || limit > PCOW_MAX_VIRTUAL_SIZE)
        damage |= DAMAGED_LIMIT;
    else
        layer->parent_limit = limit;
    if (!word_is_valid(record->state_size)
        || word_value(record->state_size) > PCOW_MAX_VIRTUAL_SIZE)
        damage |= DAMAGED_STATE_SIZE;
    else
        layer->state_size = word_value(record->state_size);
    layer->date_seconds = record->date_seconds;
    layer->date_nanoseconds = record->date_nanoseconds;
    if (record->crc != layer_record_crc(record)
        || !snapshot_name_is_valid(record->name, sizeof record->name))
        damage |= DAMAGED_NAME;
    else
        memcpy(layer->name, record->name, sizeof layer->name);
    return damage;
}

int check_write_record(struct check *check, const struct layer *layer)
{
    const size_t from = offsetof(struct layer_record, date_seconds);
    uint64_t offset = check_record_offset(check, layer->slot);
    const struct { size_t field; uint64_t value; } word[] = {
        {offsetof(struct layer_record, parent), layer->parent},
        {offsetof(struct layer_record, virtual_size), layer->virtual_size},
        {offsetof(struct layer_record, parent_limit), layer->parent_limit},
        {offsetof(struct layer_record, state_size), layer->state_size},
    };
    struct layer_record record = {.date_seconds = layer->date_seconds,
                                  .date_nanoseconds = layer->date_nanoseconds};
    int ret = 0;

    memcpy(record.name, layer->name, sizeof record.name);
    record.crc = layer_record_crc(&record);
    for (size_t i = 0; i < sizeof word / sizeof word[0] && ret == 0; i++)
        ret = check_store64(check, offset + word[i].field, word_encode(word[i].value));
    if (!ret)
        ret = check_store(check, offset + from, (const char *)&record + from, sizeof record - from);
    return ret ? ret
               : check_store64(
                   check, offset,
                   layer_state_word(layer->id, layer->state, layer->flags, layer->sequence));
}

int check_take_slot(struct check *check, uint32_t *slot)
{
    for (*slot = 0; *slot < check->slot_limit && *slot < MAX_LAYERS; ++*slot)
        if (!check->slot_taken[*slot] && check_record_offset(check, *slot)) {
            check->slot_taken[*slot] = true;
            return 0;
        }
    return -ENOSPC;
}

/* The first slab behind the end of the file that may hold anything. */
static uint64_t next_data_slab(const struct check *check)
{
    uint64_t slab = check->slab_count;

    while (slab_is_group_head(slab, check->file.heads))
        slab++;
    return slab;
}

/* A table that must be there: an empty one at the end of the file takes its place. */
static int replace_table(struct check *check, uint32_t number)
{
    uint64_t slab = next_data_slab(check);
    struct owner owner = {.kind = OWNER_TABLE, .number = number};
    int ret;

    check_corruption(check, true,
                     "layer table %u is missing, and with it the records of up to %u snapshots",
                     number, LAYER_TABLE_SLOTS);
    ret = check_lose_record(check, 0, 0);
    if (ret)
        return ret;
    if (slab >= MAX_FILE_SLABS)
        return error_set(check->error, -EFBIG,
                         "%s has no room for another layer table; convert it with pcow-img convert",
                         check->file.path);
    ret = check->repair ? file_set_size(&check->file, (slab + 1) << SLAB_BITS) : 0;
    if (ret)
        return error_set_errno(check->error, ret, "cannot extend %s", check->file.path);
    check->slab_count = slab + 1;
    check->table[number] = slab;
    ret = check_store64(check, owner_offset(slab), owner_encode(owner));
    return ret ? ret : check_add_slab(check, slab, owner);
}

static int check_tables(struct check *check)
{
    uint64_t slots = word_value(check->header.layer_slots);
    uint32_t needed = slots > LAYER_TABLE_0_SLOTS
                          ? (uint32_t)(slots - LAYER_TABLE_0_SLOTS - 1) / LAYER_TABLE_SLOTS + 1
                          : 0;
    int ret = 0;

    for (uint32_t number = CHECK_MAX_TABLE; number > needed; number--)
        if (check->table[number])
            needed = number;
    for (uint32_t number = 1; number <= needed && ret == 0; number++)
        if (!check->table[number])
            ret = replace_table(check, number);
    check->slot_limit = LAYER_TABLE_0_SLOTS + needed * LAYER_TABLE_SLOTS;
    return ret;
}

/* Nothing in a free record counts, but open() wants its words readable. */
static int check_free_record(struct check *check, const struct layer_record *record, uint32_t slot)
{
    const uint64_t *word = &record->state;
    bool damaged = false;
    int ret = 0;

    for (unsigned i = 1; i <= 4 && ret == 0; i++)
        if (!word_is_valid(word[i])) {
            damaged = true;
            ret = check_store64(check, check_record_offset(check, slot) + i * sizeof *word, 0);
        }
    if (damaged)
        check_corruption(check, true, "record %u, which is free, is damaged", slot);
    return ret;
}

/* Random bytes pass for a state word, once in 256 times: not with an id that was never given out. */
static bool state_is_possible(const struct check *check, const struct layer_record *record,
                              const struct check_layer *found)
{
    return word_is_valid(record->state) && found->layer.state <= LAYER_HIDDEN && found->layer.id
           && (!(found->damage & DAMAGED_SIZE) || check->ids_uncertain
               || found->layer.id < word_value(check->header.next_layer_id));
}

static int load_record(struct check *check, const struct layer_record *record, uint32_t slot)
{
    struct check_layer found = {0};
    int ret = 0;

    if (record->state == 0)
        return 0;
    found.damage = check_decode(record, slot, &found.layer);
    if (!state_is_possible(check, record, &found)) {
        check->lost_slots[check->lost_count++] = slot;
        check->slot_taken[slot] = true;
        return 0;
    }
    if (found.layer.state == LAYER_FREE)
        ret = check_free_record(check, record, slot);
    else
        check->slot_taken[slot] = true;
    return ret ? ret : check_add_layer(check, &found);
}

static int load_records(struct check *check)
{
    struct layer_record *batch = malloc(BATCH * sizeof *batch);
    int ret = batch ? 0 : error_set(check->error, -ENOMEM, "out of memory");

    for (uint32_t slot = 0; slot < check->slot_limit && ret == 0; slot += BATCH) {
        uint64_t offset = check_record_offset(check, slot);

        if (!offset)
            continue;
        ret = check_read(check, offset, batch, BATCH * sizeof *batch);
        for (uint32_t i = 0; i < BATCH && ret == 0; i++)
            ret = load_record(check, &batch[i], slot + i);
    }
    free(batch);
    check_sort_layers(check);
    return ret;
}

/* Of two records of one layer, as layers_load() does: the one with the higher sequence counts. */
static int drop_duplicate(struct check *check, struct check_layer *kept,
                          const struct check_layer *other)
{
    const struct check_layer *loser = other;
    bool renamed = kept->layer.sequence != other->layer.sequence;
    unsigned pinned;
    uint32_t slot;
    int ret;

    if (other->layer.state == LAYER_FREE)
        return 0;
    if (kept->layer.state == LAYER_FREE) {
        *kept = *other;
        return 0;
    }
    if (renamed ? (uint8_t)(other->layer.sequence - kept->layer.sequence) < 128
                : check_is_proven(check, check_record_offset(check, other->layer.slot))
                      || !check_is_proven(check, check_record_offset(check, kept->layer.slot)))
        loser = kept;
    slot = loser->layer.slot;
    if (renamed)
        check_leak(check,
                   "record %u is what an interrupted rename left of the old name of layer %u", slot,
                   kept->layer.id);
    else
        check_corruption(check, true, "records %u and %u both describe layer %u; the %s counts",
                         kept->layer.slot, other->layer.slot, kept->layer.id,
                         loser == kept ? "second" : "first");
    pinned = (kept->layer.flags | other->layer.flags) & LAYER_PINNED;
    if (loser == kept)
        *kept = *other;
    /* Nobody knows which of them is the older one: what may stand on it shall not lose it. */
    if (!renamed && pinned & ~kept->layer.flags) {
        kept->layer.flags |= pinned;
        kept->rewrite = true;
    }
    check->slot_taken[slot] = false;
    ret = renamed ? 0 : check_lose_record(check, kept->layer.id, check_record_offset(check, slot));
    return ret ? ret : check_store64(check, check_record_offset(check, slot), 0);
}

static int drop_duplicates(struct check *check)
{
    size_t kept = 0;
    int ret = 0;

    for (size_t i = 0; i < check->layer_count && ret == 0; i++)
        if (kept && check->layers[kept - 1].layer.id == check->layers[i].layer.id)
            ret = drop_duplicate(check, &check->layers[kept - 1], &check->layers[i]);
        else
            check->layers[kept++] = check->layers[i];
    check->layer_count = kept;
    return ret;
}

/* The file ends before the last record that was in use. */
static bool records_are_cut(const struct check *check)
{
    uint64_t slots = word_value(check->header.layer_slots);

    if (slots > LAYER_TABLE_0_SLOTS)
        slots = LAYER_TABLE_0_SLOTS;
    return check->length < LAYER_TABLE_OFFSET + slots * LAYER_RECORD_SIZE;
}

int check_records(struct check *check)
{
    int ret = check_tables(check);

    if (!ret && records_are_cut(check))
        ret = check_lose_record(check, 0, 0);
    if (ret)
        return ret;
    check->slot_taken = calloc(check->slot_limit, sizeof *check->slot_taken);
    check->lost_slots = calloc(check->slot_limit, sizeof *check->lost_slots);
    if (!check->slot_taken || !check->lost_slots)
        return error_set(check->error, -ENOMEM, "out of memory");
    ret = load_records(check);
    return ret ? ret : drop_duplicates(check);
}
