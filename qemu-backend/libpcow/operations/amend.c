/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Give an image that was made without it a mirror, in place. Every step leaves an image that can be
 * read, and an interrupted one is done again from its begin:
 *
 *   the word *state* says "amending": no writer but this may open the image;
 *   what lies where the mirror is to be is copied to other slabs, each of which then gets its
 *     owner; then that of the old one is cleared. In between both hold the same;
 *   the mirror is made of all pages;
 *   the copy of the header gets the feature, then the header, whose checksum is the last store.
 *     Between these two stores open() refuses it, and check -r takes the copy;
 *   "amending" is cleared.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "image/known.h"
#include "image/lock.h"
#include "image/mirror.h"
#include "operations/operations.h"
#include "util/error.h"

#define PIECE (UINT64_C(256) << 10)

static int set_amending(struct pcow_image *image, bool on, struct pcow_error *error)
{
    uint64_t state = word_value(image->header.state) & ~(uint64_t)HEADER_AMENDING;

    return header_store_word(image, offsetof(struct header, state),
                             state | (on ? HEADER_AMENDING : 0), error);
}

/* ---- make room ------------------------------------------------------------------------------- */

/* Slabs that are to be heads are not given out any more, nor in the groups that may follow. */
static void reserve_heads(struct pcow_image *image)
{
    uint64_t end = 2 * (image_slab_count(image) / SLABS_PER_GROUP) + 2;

    for (uint64_t group = 0; group < end && group < MAX_GROUPS; group++)
        for (unsigned i = 1; i < MIRROR_HEADS; i++) {
            uint64_t slab = group * SLABS_PER_GROUP + i;

            __atomic_fetch_or(&image->used[slab / 64], slab_bit(slab), __ATOMIC_RELAXED);
        }
}

static int copy_data(struct pcow_image *image, uint64_t from, uint64_t to)
{
    uint64_t at = from << SLAB_BITS, end = at + PCOW_SLAB_SIZE;
    char *piece = malloc(PIECE);
    int ret = piece ? 0 : -ENOMEM;

    for (; at < end && !ret; at += PIECE) {
        if (file_is_hole(&image->file, at, PIECE))
            continue;
        ret = file_read(&image->file, at, piece, PIECE);
        if (!ret)
            ret = file_write_data(&image->file, (to << SLAB_BITS) + (at - (from << SLAB_BITS)),
                                  piece, PIECE);
    }
    free(piece);
    return ret ? ret : file_commit(&image->file);
}

static bool holds_all(const struct page_set *all, const struct page_set *of)
{
    for (unsigned w = 0; w < PAGE_SET_WORDS; w++)
        if (of->word[w] & ~all->word[w])
            return false;
    return true;
}

/*
 * Where an interrupted run has copied it to; 0: nowhere. If a version that knows nothing of this
 * has written to the image since, one of both is older: who reads takes the table of the lower
 * number, and data from the higher one.
 */
static uint64_t find_copy(const struct pcow_image *image, uint64_t slab)
{
    const struct slab *owner = &image->slabs[slab];

    for (uint64_t p = 1; p < image_slab_count(image); p++) {
        const struct slab *other = &image->slabs[p];

        if (p % SLABS_PER_GROUP >= MIRROR_HEADS && other->kind == owner->kind
            && other->layer == owner->layer && other->number == owner->number
            && (owner->kind != OWNER_DATA || holds_all(&image->valid[p], &image->valid[slab])))
            return p;
    }
    return 0;
}

static bool copy_counts(const struct pcow_image *image, uint64_t slab, uint64_t copy)
{
    return image->slabs[slab].kind == OWNER_TABLE ? copy < slab : copy > slab;
}

static int disown(struct pcow_image *image, uint64_t slab)
{
    int ret = file_store64(&image->file, owner_offset(slab), 0, false);

    if (!ret)
        image->slabs[slab] = (struct slab){0};
    return ret;
}

static int copy_slab(struct pcow_image *image, uint64_t slab)
{
    const struct slab *owner = &image->slabs[slab];
    uint64_t to;
    int ret = slab_take(image, &to);

    if (ret)
        return ret;
    ret = copy_data(image, slab, to);
    if (!ret && owner->kind == OWNER_DATA)
        ret = slab_store_valid(image, to, &image->valid[slab], false);
    if (!ret)
        ret = slab_publish(image, to, (struct owner){.kind = owner->kind,
                                                     .layer = owner->layer,
                                                     .number = owner->number},
                           false);
    if (ret)
        slab_untake(image, to);
    return ret;
}

static int move_slab(struct pcow_image *image, uint64_t slab)
{
    static const struct page_set empty;
    uint64_t copy = image->slabs[slab].kind == OWNER_NONE ? 0 : find_copy(image, slab);
    int ret = 0;

    if (copy && !copy_counts(image, slab, copy)) {
        ret = disown(image, copy);
        if (!ret)
            slab_untake(image, copy);
        copy = 0;
    }
    if (!ret && image->slabs[slab].kind != OWNER_NONE && !copy)
        ret = copy_slab(image, slab);
    if (!ret && image->slabs[slab].kind != OWNER_NONE)
        ret = disown(image, slab);
    if (ret)
        return ret;
    ret = slab_store_valid(image, slab, &empty, false);
    if (!ret)
        ret = file_punch(&image->file, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    return ret ? ret : file_settle(&image->file);
}

static int make_room(struct pcow_image *image)
{
    uint64_t count = image_slab_count(image);
    int ret = 0;

    reserve_heads(image);
    for (uint64_t slab = 0; slab < count && !ret; slab++)
        if (slab % SLABS_PER_GROUP && slab_is_group_head(slab, MIRROR_HEADS))
            ret = move_slab(image, slab);
    return ret;
}

/* ---- make the mirror ------------------------------------------------------------------------- */

static int mark_pages(struct pcow_image *image, uint64_t group)
{
    uint64_t at = group * GROUP_SIZE, end = at + PCOW_SLAB_SIZE;
    int ret = 0;

    for (; at < end && !ret; at += PCOW_PAGE_SIZE)
        if (metadata_page_counts((unsigned)(at % PCOW_SLAB_SIZE / PCOW_PAGE_SIZE))
            && !file_is_hole(&image->file, at, PCOW_PAGE_SIZE))
            ret = mirror_mark_page(&image->file, at / PCOW_PAGE_SIZE);
    return ret;
}

static int make_mirror(struct pcow_image *image, const struct header *header)
{
    int ret = file_grow(&image->file, MIRROR_HEADS * PCOW_SLAB_SIZE);

    if (!ret)
        ret = mirror_attach(&image->file, header);
    for (uint64_t group = 0; !ret && group * GROUP_SIZE < image->file.size; group++)
        ret = mark_pages(image, group);
    return ret ? ret : mirror_sync_alone(&image->file, &(struct mirror_known){known_page, image});
}

/*
 * The pool is full. What was moved lies where it is as well as before, so the image is whole
 * without a mirror: nobody shall have to wait for space to use it.
 */
static void go_back(struct pcow_image *image, unsigned heads)
{
    uint64_t count = image_slab_count(image);
    int ret = 0;

    for (uint64_t slab = 1; slab < count && !ret; slab++)
        if (slab_is_group_head(slab, MIRROR_HEADS) && slab % SLABS_PER_GROUP
            && image->slabs[slab].kind != OWNER_NONE && find_copy(image, slab))
            ret = -EEXIST;
    if (ret)
        return;
    mirror_detach(&image->file);
    image->file.heads = heads;
    for (uint64_t slab = 1; slab < count && !ret; slab++)
        if (slab_is_group_head(slab, MIRROR_HEADS) && slab % SLABS_PER_GROUP
            && image->slabs[slab].kind == OWNER_NONE)
            ret = file_punch(&image->file, slab << SLAB_BITS, PCOW_SLAB_SIZE);
    if (!ret)
        ret = file_settle(&image->file);
    if (!ret)
        set_amending(image, false, NULL);
}

/* ---- tell ------------------------------------------------------------------------------------ */

static int store_feature(struct pcow_image *image, const struct header *header)
{
    /* The checksum is the second half of its word. */
    const size_t last = offsetof(struct header, crc) - sizeof header->crc;
    uint64_t word;
    int ret = file_store(&image->file, HEADER_COPY_OFFSET, header, sizeof *header);

    image->header_copied = false;
    if (!ret)
        ret = file_store64(&image->file, offsetof(struct header, read_only_compatible_features),
                           header->read_only_compatible_features, false);
    memcpy(&word, (const char *)header + last, sizeof word);
    return ret ? ret : file_store64(&image->file, last, word, false);
}

static int add_mirror(struct pcow_image *image, struct pcow_error *error)
{
    struct header header;
    /*
     * No change of the content: images on this one need not notice. But nobody may read it: not a
     * snapshot either, of which a slab would be given back under the reader.
     */
    int ret = lock_everything(&image->file, error);

    if (!ret)
        ret = image_unshare(image, error);
    if (!ret)
        ret = set_amending(image, true, error);
    if (ret)
        return ret;
    header = image->header;
    header.read_only_compatible_features |= FEATURE_MIRROR;
    header.crc = header_crc(&header);
    ret = make_room(image);
    if (!ret)
        ret = make_mirror(image, &header);
    if (ret)
        go_back(image, 1);
    else
        ret = store_feature(image, &header);
    /* What memory knows of the header is not what the file says, from the first store on. */
    if (ret)
        file_become_unsure(&image->file);
    if (ret)
        return error_set_errno(error, ret,
                               "cannot give %s a mirror of its metadata; nothing is lost, do it "
                               "again when the reason is gone",
                               image->file.path);
    image->header = header;
    return 0;
}

int pcow_add_mirror(const char *path, struct pcow_error *error)
{
    return image_add_mirror(path, NULL, error);
}

int image_add_mirror(const char *path, struct observer *observer, struct pcow_error *error)
{
    pcow_image *image;
    int ret = image_open(path, PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE | OPEN_AMENDING, NULL, observer,
                         &image, error);

    if (ret)
        return ret;
    if (image->file.heads == 1)
        ret = add_mirror(image, error);
    if (!ret && word_value(image->header.state) & HEADER_AMENDING) {
        ret = set_amending(image, false, error);
        if (!ret)
            ret = header_write_copy(image, error);
    }
    if (!ret)
        ret = pcow_finish(image, error);
    pcow_close(image);
    return ret;
}
