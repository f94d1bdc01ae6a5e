/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "image/image.h"
#include "image/lock.h"
#include "util/error.h"

bool image_is_inherited(const struct pcow_image *image)
{
    return image->process != getpid();
}

int image_error_inherited(const struct pcow_image *image, struct pcow_error *error)
{
    return error_set(error, -EPERM,
                     "%s was opened by process %d, which may be using it, and not by this child of "
                     "it; open it here",
                     image->file.path, (int)image->process);
}

int image_check_writable(const struct pcow_image *image, struct pcow_error *error)
{
    if (image->format1)
        return error_set(error, -EROFS,
                         "%s has format 1, which is read-only; convert it with pcow-img convert -f "
                         "pcow1 -O pcow",
                         image->file.path);
    if (!image->file.writable)
        return error_set(error, -EROFS, "%s is open read-only", image->file.path);
    if (image_is_inherited(image))
        return image_error_inherited(image, error);
    return 0;
}

static int store_word(struct pcow_image *image, size_t field, uint64_t value, bool lazily,
                      struct pcow_error *error)
{
    uint64_t word = word_encode(value);
    int ret = file_store64(&image->file, field, word, lazily);

    if (ret)
        return error_set_errno(error, ret, "%s: cannot update the header", image->file.path);
    memcpy((char *)&image->header + field, &word, sizeof word);
    return 0;
}

int header_store_word(struct pcow_image *image, size_t field, uint64_t value,
                      struct pcow_error *error)
{
    return store_word(image, field, value, false, error);
}

int header_store_word_lazily(struct pcow_image *image, size_t field, uint64_t value,
                             struct pcow_error *error)
{
    return store_word(image, field, value, true, error);
}

int header_touch(struct pcow_image *image, struct pcow_error *error)
{
    int ret = file_touch(&image->file, 0);

    return ret ? error_set_errno(error, ret, "%s: cannot update the header", image->file.path) : 0;
}

int header_write_copy(struct pcow_image *image, struct pcow_error *error)
{
    /* Only check -r reads it, and takes no word of it that is torn: any later flush will do. */
    int ret = file_store_lazily(&image->file, HEADER_COPY_OFFSET, &image->header, HEADER_SIZE);

    image->header_copied = ret == 0;
    image->header_copy = image->header;
    return ret ? error_set_errno(error, ret, "%s: cannot update the copy of the header",
                                 image->file.path)
               : 0;
}

/* Metadata is stored through mappings: none of it may share blocks with a copy of the file. */
int image_unshare(struct pcow_image *image, struct pcow_error *error)
{
    int ret = 0;

    for (uint64_t p = 0; image->file.may_share && p < image_slab_count(image) && ret == 0; p++) {
        unsigned kind = slab_peek(image, p).kind;

        if (slab_is_group_head(p, image->file.heads) || kind == OWNER_STATE || kind == OWNER_TABLE)
            ret = file_unshare(&image->file, p << SLAB_BITS, PCOW_SLAB_SIZE);
    }
    return ret ? error_set_errno(error, ret,
                                 "%s shares blocks with a copy of it, and the pool has no space "
                                 "for its own",
                                 image->file.path)
               : 0;
}

int image_begin_change(struct pcow_image *image, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (ret || image->changed)
        return ret;
    ret = image_unshare(image, error);
    if (ret)
        return ret;
    /*
     * Before the first change: an image that was based on the old content must see that it is gone.
     */
    ret = header_store_word(image, offsetof(struct header, generation),
                            word_value(image->header.generation) + 1, error);
    if (ret == 0)
        image->changed = true;
    return ret;
}

const struct base_record *image_base_record(const struct pcow_image *image)
{
    uint64_t slot = word_value(image->header.base_slot);

    return image->format1 || slot == 0 ? NULL : &image->header.base[slot - 1];
}

/* In the copy first: a copy that names one where the header has none tells of damage. */
static int take_base_off_copy(struct pcow_image *image, struct pcow_error *error)
{
    int ret = file_store64(&image->file, HEADER_COPY_OFFSET + offsetof(struct header, base_slot), 0,
                           false);

    image->header_copy.base_slot = 0;
    return ret ? error_set_errno(error, ret, "%s: cannot update the copy of the header",
                                 image->file.path)
               : 0;
}

int header_set_base(struct pcow_image *image, const struct base_record *record,
                    struct pcow_error *error)
{
    uint64_t slot = 0;
    int ret = lock_tree(&image->file, true, error);

    if (ret)
        return ret;
    if (!record)
        ret = take_base_off_copy(image, error);
    if (record) {
        /* The record not in use is written and made durable; then one store switches. */
        slot = word_value(image->header.base_slot) == 1 ? 2 : 1;
        ret = file_store(&image->file, offsetof(struct header, base) + (slot - 1) * sizeof *record,
                         record, sizeof *record);
        if (ret)
            error_set_errno(error, ret, "%s: cannot write the name of its base", image->file.path);
        else
            image->header.base[slot - 1] = *record;
    }
    if (!ret)
        ret = header_store_word(image, offsetof(struct header, base_slot), slot, error);
    if (!ret)
        ret = header_write_copy(image, error);
    unlock_tree(&image->file);
    return ret;
}
