/* SPDX-License-Identifier: BSD-3-Clause */
#include <errno.h>
#include <fcntl.h>

#include "image/datasum.h"
#include "image/mirror.h"
#include "operations/operations.h"
#include "util/error.h"

static bool all_have_checksums(const struct pcow_image *image)
{
    for (uint64_t p = 1; p < image_slab_count(image); p++) {
        struct slab owner = slab_peek(image, p);

        if ((owner.kind == OWNER_DATA || owner.kind == OWNER_STATE)
            && !datasum_may_be(&image->file, p))
            return false;
    }
    return image->file.summed;
}

int pcow_seal(pcow_image *image, struct pcow_error *error)
{
    int ret = image_check_writable(image, error);

    if (!ret)
        ret = pcow_flush(image, error);
    if (!ret)
        ret = header_store_word(image, offsetof(struct header, state),
                                word_value(image->header.state) | HEADER_SEALED
                                    | (all_have_checksums(image) ? HEADER_CHECKSUMS : 0),
                                error);
    return ret ? ret : header_write_copy(image, error);
}

int pcow_set_copy_on_read(pcow_image *image, bool on, struct pcow_error *error)
{
    uint64_t state = word_value(image->header.state) & ~(uint64_t)HEADER_COPY_ON_READ;
    int ret = image_check_writable(image, error);

    /* No change of the content: images on this one need not notice. */
    if (!ret)
        ret = header_store_word(image, offsetof(struct header, state),
                                state | (on ? HEADER_COPY_ON_READ : 0), error);
    return ret ? ret : header_write_copy(image, error);
}

int pcow_unseal(const char *path, struct pcow_error *error)
{
    return image_unseal(path, NULL, error);
}

int image_unseal(const char *path, struct observer *observer, struct pcow_error *error)
{
    struct pcow_image image = {.directory = -1};
    int ret = file_open(&image.file, AT_FDCWD, path, path, FILE_WRITE, observer, error);

    if (ret)
        return ret;
    ret = file_read(&image.file, 0, &image.header, sizeof image.header);
    if (ret)
        error_set_errno(error, ret = ret == -ENODATA ? -EMEDIUMTYPE : ret,
                        "cannot read the header of %s", path);
    else
        ret = header_validate(&image.header, path, error);
    if (!ret && image.header.read_only_compatible_features & ~FEATURES_KNOWN)
        ret = error_set(error, -ENOTSUP,
                        "%s uses features (0x%llx) that this program can read but not write; use a "
                        "newer pcow",
                        path, (unsigned long long)image.header.read_only_compatible_features);
    if (!ret && mirror_attach(&image.file, &image.header))
        ret = error_set(error, -ENOMEM, "out of memory");
    if (!ret)
        ret = mirror_verify(&image.file, error);
    /*
     * Until a writer changes something, one that is gone is damage: whoever makes them again must
     * not take it for one that was never made.
     */
    if (!ret && word_value(image.header.state) & HEADER_CHECKSUMS)
        ret = header_store_word(&image, offsetof(struct header, summed),
                                word_value(image.header.generation), error);
    if (!ret)
        ret = header_store_word(&image, offsetof(struct header, state),
                                word_value(image.header.state)
                                    & ~(uint64_t)(HEADER_SEALED | HEADER_CHECKSUMS),
                                error);
    if (!ret)
        ret = header_write_copy(&image, error);
    if (!ret)
        mirror_sync(&image.file, NULL);
    file_close(&image.file);
    return ret;
}
