/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Data and its checksums. A writer may be at work beside us: he drops a checksum before he changes
 * what it is of. So what differs is damage only if the checksum is still there afterwards.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "operations/operations.h"
#include "operations/verify_data.h"
#include "snapshot/summed.h"
#include "util/error.h"
#include "util/sized.h"

#define MOST_SHOWN 200u
#define SUMS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(struct datasum))

static void __attribute__((format(printf, 2, 3))) damage(struct verify *verify, const char *format,
                                                         ...)
{
    char message[TEXT_SIZE];
    va_list args;

    if (verify->result->corruptions++ >= MOST_SHOWN) {
        verify->hidden++;
        return;
    }
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (verify->result->corruptions == 1)
        memcpy(verify->first, message, sizeof message);
    if (!verify->finding)
        return;
    verify->finding(verify->opaque, PCOW_FINDING_CORRUPTION, message);
}

/* "the 2 MiB from guest byte 0 of snapshot 's1' (file slab 3)" */
static const char *describe(const struct verify *verify, char *text, size_t size)
{
    const struct datasum_subject *subject = &verify->subject;
    const struct pcow_image *image = verify->image;
    const struct layer *layer = layer_find(image, subject->owner.layer);
    uint64_t first = (uint64_t)subject->owner.number << SLAB_BITS;
    const char *what = subject->owner.kind == OWNER_STATE ? "VM state" : "guest";

    char whose[PCOW_SNAPSHOT_NAME_SIZE + 16];

    if (layer && layer->id == image_active(image))
        snprintf(whose, sizeof whose, "the active layer");
    else if (layer && layer->state == LAYER_SNAPSHOT)
        snprintf(whose, sizeof whose, "snapshot '%s'", layer->name);
    else
        snprintf(whose, sizeof whose, "layer %u", subject->owner.layer);
    snprintf(text, size, "the 2 MiB from %s byte %" PRIu64 " of %s (file slab %" PRIu64 ")", what,
             first, whose, subject->slab);
    return text;
}

static uint64_t bytes_of(const struct datasum_subject *subject)
{
    return subject->owner.kind == OWNER_DATA ? page_set_count(&subject->valid) * PCOW_PAGE_SIZE
                                             : PCOW_SLAB_SIZE;
}

/* The checksum, and then whose the slab is. */
static int read_slab(struct verify *verify, uint64_t slab)
{
    const struct file *file = &verify->image->file;
    struct datasum_subject *subject = &verify->subject;
    uint64_t word;
    int ret = file_read(file, datasum_offset(slab), &verify->datasum, sizeof verify->datasum);

    bool unreadable = ret == -EIO;

    if (!ret || unreadable)
        ret = file_read(file, owner_offset(slab), &word, sizeof word);
    if (ret)
        return ret;
    *subject = (struct datasum_subject){.slab = slab};
    /* A damaged one is told by pcow_check(). */
    if (word_is_valid(word))
        subject->owner = owner_decode(word);
    /* A damaged one, if it is of anything, and no reason to leave out all others. */
    if (unreadable)
        memset(&verify->datasum, subject->owner.kind == OWNER_NONE ? 0 : 0xff,
               sizeof verify->datasum);
    return subject->owner.kind == OWNER_DATA
               ? file_read(file, bitmap_offset(slab), &subject->valid, sizeof subject->valid)
               : 0;
}

static bool is_still_there(const struct verify *verify)
{
    struct datasum datasum;
    int ret = file_read(&verify->image->file, datasum_offset(verify->subject.slab), &datasum,
                        sizeof datasum);

    return ret == -EIO || (!ret && !memcmp(&datasum, &verify->datasum, sizeof datasum));
}

/*
 * Have all slabs of the file had one, says the header? Looked at after the checksum: who takes the
 * seal off does that before he drops any, and who writes to an image that was sealed raises the
 * generation before.
 */
static bool all_had_one(const struct file *file)
{
    struct header header;

    if (file_read(file, offsetof(struct header, generation), &header.generation,
                  offsetof(struct header, reserved1) - offsetof(struct header, generation)))
        return false;
    return word_value(header.state) & HEADER_CHECKSUMS
           || (header.summed && word_is_valid(header.summed)
               && header.summed == header.generation);
}

static bool is_gone(const struct verify *verify)
{
    const struct layer *layer = layer_find(verify->image, verify->subject.owner.layer);
    bool all = all_had_one(&verify->image->file);

    /*
     * Who merges layers takes their flags off before he drops any; whose slab it was may have
     * changed since, and it may have got one again.
     */
    if (!all && verify->subject.owner.kind == OWNER_DATA && layer)
        all = summed_is_set(verify->image, layer) && is_still_there(verify);
    return all;
}

static enum verdict verify_without(struct verify *verify)
{
    char text[TEXT_SIZE];

    verify->result->without += bytes_of(&verify->subject);
    if (!is_gone(verify))
        return VERDICT_NONE;
    damage(verify, "%.600s: its checksum is gone", describe(verify, text, sizeof text));
    return VERDICT_DAMAGED;
}

static int verify_with(struct verify *verify, enum verdict *verdict)
{
    const struct datasum_subject *subject = &verify->subject;
    const struct datasum *datasum = &verify->datasum;
    struct pcow_data_result *result = verify->result;
    const struct file *file = &verify->image->file;
    bool owned = subject->owner.kind == OWNER_DATA || subject->owner.kind == OWNER_STATE;
    bool good = datasum_is_good(file, subject->slab, datasum);
    char text[TEXT_SIZE];
    uint64_t hash[2];
    int ret = 0;

    if (good && owned) {
        ret = datasum_hash(file, subject, verify->buffer, hash);
        if (!ret && !memcmp(hash, datasum->hash, sizeof hash)
            && datasum->word == datasum_word(subject->owner.layer)) {
            result->verified += bytes_of(subject);
            *verdict = VERDICT_GOOD;
            return 0;
        }
    }
    if (ret && ret != -EIO)
        return ret;
    if (!is_still_there(verify)) {
        result->without += owned ? bytes_of(subject) : 0;
        return 0;
    } else if (!owned) {
        damage(verify, "file slab %" PRIu64 " holds no data but has a checksum, which is damaged",
               subject->slab);
    } else if (!good) {
        result->unjudged += bytes_of(subject);
        damage(verify, "%.600s: its checksum is damaged, so the data cannot be judged",
               describe(verify, text, sizeof text));
    } else {
        result->damaged += bytes_of(subject);
        damage(verify, ret ? "%.600s: the medium cannot read it"
                           : "%.600s: it is not what its checksum was made of",
               describe(verify, text, sizeof text));
    }
    *verdict = VERDICT_DAMAGED;
    return 0;
}

int verify_slab(struct verify *verify, uint64_t slab, enum verdict *verdict)
{
    enum owner_kind kind;
    int ret = read_slab(verify, slab);

    *verdict = VERDICT_NONE;
    if (ret)
        return ret;
    kind = verify->subject.owner.kind;
    if (verify->datasum.word)
        return verify_with(verify, verdict);
    if (kind == OWNER_DATA || kind == OWNER_STATE)
        *verdict = verify_without(verify);
    return 0;
}

int verify_may_make(struct verify *verify, uint64_t slab, bool *may)
{
    int ret = read_slab(verify, slab);

    *may = !ret && !verify->datasum.word && !is_gone(verify);
    return ret;
}

void verify_end(const struct verify *verify)
{
    char message[100];

    if (!verify->hidden || !verify->finding)
        return;
    snprintf(message, sizeof message, "and %u more", verify->hidden);
    verify->finding(verify->opaque, PCOW_FINDING_NOTE, message);
}

/* Slabs without an owner cost nothing, and are no part of the progress. */
static uint64_t count_owned(const struct pcow_image *image)
{
    uint64_t count = 0;

    for (uint64_t p = 1; p < image_slab_count(image); p++)
        count += slab_peek(image, p).kind != OWNER_NONE;
    return count;
}

/* Have the slabs of a page of checksums neither owners nor checksums? */
static bool is_unused(const struct pcow_image *image, uint64_t first)
{
    uint64_t offset = datasum_offset(first);

    for (uint64_t p = first; p < first + SUMS_PER_PAGE && p < image_slab_count(image); p++)
        if (slab_peek(image, p).kind != OWNER_NONE)
            return false;
    return file_next_data(&image->file, offset, offset + PCOW_PAGE_SIZE)
           >= offset + PCOW_PAGE_SIZE;
}

static int verify_all(struct verify *verify, pcow_progress_fn progress, struct pcow_error *error)
{
    struct pcow_image *image = verify->image;
    uint64_t total = count_owned(image), done = 0;
    enum verdict verdict;
    int ret = 0;

    for (uint64_t p = 1; p < image_slab_count(image) && !ret; p++) {
        if (slab_is_group_head(p, image->file.heads))
            continue;
        if (p % SUMS_PER_PAGE == 0 && is_unused(image, p)) {
            p += SUMS_PER_PAGE - 1;
            if (p % SLABS_PER_GROUP == SLABS_PER_GROUP - 1 && progress
                && progress(verify->opaque, done * PCOW_SLAB_SIZE, total * PCOW_SLAB_SIZE))
                ret = error_set(error, -ECANCELED, "%s: cancelled", image->file.path);
            continue;
        }
        ret = verify_slab(verify, p, &verdict);
        if (ret)
            return error_set_errno(error, ret, "%s: cannot read file slab %llu, or its checksum",
                                   image->file.path, (unsigned long long)p);
        if (slab_peek(image, p).kind != OWNER_NONE && progress
            && progress(verify->opaque, ++done * PCOW_SLAB_SIZE, total * PCOW_SLAB_SIZE))
            ret = error_set(error, -ECANCELED, "%s: cancelled", image->file.path);
    }
    return ret;
}

static void count_without(const struct pcow_image *image, struct pcow_data_result *result)
{
    for (uint64_t p = 1; p < image_slab_count(image); p++)
        if (slab_peek(image, p).kind == OWNER_DATA)
            result->without += page_set_count(&image->valid[p]) * PCOW_PAGE_SIZE;
        else if (slab_peek(image, p).kind == OWNER_STATE)
            result->without += PCOW_SLAB_SIZE;
}

static int check_data(const char *path, unsigned flags, pcow_finding_fn finding,
                      pcow_progress_fn progress, void *opaque, struct pcow_data_result *result,
                      struct pcow_error *error)
{
    struct verify verify = {.finding = finding, .opaque = opaque, .result = result};
    unsigned open_flags =
        PCOW_OPEN_NO_BASE | (flags & PCOW_CHECK_FORCE_SHARE ? PCOW_OPEN_FORCE_SHARE : 0);
    int ret;

    memset(result, 0, sizeof *result);
    ret = image_open(path, open_flags, NULL, NULL, &verify.image, error);
    if (ret)
        return ret;
    verify.buffer = malloc(DATASUM_BUFFER);
    if (!verify.buffer)
        ret = error_set(error, -ENOMEM, "out of memory");
    else if (verify.image->file.heads < MIRROR_HEADS)
        count_without(verify.image, result);
    else
        ret = verify_all(&verify, progress, error);
    verify_end(&verify);
    free(verify.buffer);
    pcow_close(verify.image);
    return ret;
}

int pcow_check_data_sized(const char *path, unsigned flags, pcow_finding_fn finding,
                          pcow_progress_fn progress, void *opaque, struct pcow_data_result *given,
                          size_t size, struct pcow_error *error)
{
    struct pcow_data_result result;
    int ret = check_data(path, flags, finding, progress, opaque, &result, error);

    sized_give(given, size, &result, sizeof result);
    return ret;
}
