/* SPDX-License-Identifier: BSD-3-Clause */
/* Checksums of data, when what they are of is repaired. */
#include "check/check.h"

#include <errno.h>

#include "image/datasum.h"
#include "util/error.h"

#define RECORDS (PCOW_PAGE_SIZE / LAYER_RECORD_SIZE)
#define WORDS (PCOW_PAGE_SIZE / sizeof(uint64_t))

/* Records from offset on, in whole pages, that say of their layers that all data has checksums. */
static int stop_records(struct check *check, uint64_t offset, unsigned slots)
{
    struct layer_record records[RECORDS];
    int ret = 0;

    for (unsigned slot = 0; slot < slots && !ret; slot += RECORDS) {
        ret = check_read(check, offset + slot * LAYER_RECORD_SIZE, records, sizeof records);
        for (unsigned i = 0; i < RECORDS && !ret; i++) {
            uint64_t word = records[i].state, flag = (uint64_t)LAYER_SUMMED << 32;

            if (!word_is_valid(word) || !(word & flag))
                continue;
            ret = check_store64(check, offset + (slot + i) * LAYER_RECORD_SIZE,
                                word_encode(word_value(word) & ~flag));
            check->layers_unsummed = true;
        }
    }
    return ret;
}

static int stop_layers(struct check *check)
{
    uint64_t words[WORDS];
    int ret = stop_records(check, LAYER_TABLE_OFFSET, LAYER_TABLE_0_SLOTS);

    for (uint64_t slab = 0; slab < check->slab_count && !ret; slab += WORDS) {
        ret = check_read(check, owner_offset(slab), words, sizeof words);
        for (unsigned i = 0; i < WORDS && slab + i < check->slab_count && !ret; i++)
            if (word_is_valid(words[i]) && owner_decode(words[i]).kind == OWNER_TABLE)
                ret = stop_records(check, (slab + i) << SLAB_BITS, LAYER_TABLE_SLOTS);
    }
    return ret;
}

/*
 * A repair that is interrupted has dropped checksums, perhaps, and the next one does not know of
 * them: so header and records are the first to stop promising them. Not if it drops none of what
 * stays owned: or an interrupted one would end the promise for nothing.
 */
static int stop_promising(struct check *check)
{
    uint64_t state = word_value(check->header.state);
    int ret;

    if (!check->repair || !check->dropped_before || check->file.heads < MIRROR_HEADS)
        return 0;
    ret = stop_layers(check);
    if (!ret && check->header.summed)
        ret = check_set_header_word(check, offsetof(struct header, summed), 0);
    if (ret || !(state & HEADER_CHECKSUMS))
        return ret;
    check->all_summed = true;
    return check_set_header_word(check, offsetof(struct header, state),
                                 state & ~(uint64_t)HEADER_CHECKSUMS);
}

int check_datasums(struct check *check)
{
    int ret = stop_promising(check);

    if (ret)
        return ret;
    ret = check->repair ? datasum_attach(&check->file) : 0;
    return ret ? error_set_errno(check->error, ret, "cannot read the checksums of the data of %s",
                                 check->file.path)
               : 0;
}

/* A bit that flipped in one that is of nothing: nobody else would ever drop it. */
int check_datasums_of_nobody(struct check *check)
{
    int ret = 0;

    for (uint64_t slab = 0, i = 0; check->file.summed && check->repair && slab < check->slab_count
                                   && !ret; slab++) {
        while (i < check->count && check->slabs[i].slab < slab)
            i++;
        if (i == check->count || check->slabs[i].slab > slab
            || (check->slabs[i].owner.kind != OWNER_DATA
                && check->slabs[i].owner.kind != OWNER_STATE))
            ret = datasum_drop(&check->file, slab);
    }
    return ret ? error_set_errno(check->error, ret, "cannot repair %s", check->file.path) : 0;
}

int check_all_summed(struct check *check)
{
    uint64_t state = word_value(check->header.state), dropped = 0;

    for (size_t i = 0; check->repair && i < check->count; i++) {
        const struct check_slab *slab = &check->slabs[i];

        dropped += slab->summed && !datasum_may_be(&check->file, slab->slab)
                   && (slab->owner.kind == OWNER_DATA || slab->owner.kind == OWNER_STATE);
    }
    if (check->layers_unsummed)
        check_note(check, "the repair dropped checksums of data; of snapshots that had them all, one "
                          "that is lost is not told any more until 'pcow-img checksum' was run");
    if (!check->all_summed)
        return 0;
    if (!dropped)
        return check_set_header_word(check, offsetof(struct header, state),
                                     state | HEADER_CHECKSUMS);
    check_note(check,
               "%llu slabs were changed by the repair and have no checksum any more, so not all "
               "data of this sealed image has one",
               (unsigned long long)dropped);
    return 0;
}
