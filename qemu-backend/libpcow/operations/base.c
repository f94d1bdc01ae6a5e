/* SPDX-License-Identifier: BSD-3-Clause */
/* What an image records of the base that it stands on. */
#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "operations/operations.h"
#include "snapshot/pin.h"
#include "util/error.h"

/* 0 if both paths name files of one directory. */
static int same_directory(const char *a, const char *b, struct pcow_error *error)
{
    char *copy_a = strdup(a), *copy_b = strdup(b);
    struct stat dir_a, dir_b;
    int ret = 0;

    if (!copy_a || !copy_b)
        ret = error_set(error, -ENOMEM, "out of memory");
    else if (stat(dirname(copy_a), &dir_a))
        ret = error_set_errno(error, -errno, "cannot find the directory of %s", a);
    else if (stat(dirname(copy_b), &dir_b))
        ret = error_set_errno(error, -errno, "cannot find the directory of %s", b);
    else if (dir_a.st_dev != dir_b.st_dev || dir_a.st_ino != dir_b.st_ino)
        ret = error_set(error, -EXDEV,
                        "%s must lie in the same directory (pool) as %s to be its base; move or "
                        "convert it there",
                        b, a);
    free(copy_a);
    free(copy_b);
    return ret;
}

/* An image on this base can be opened. */
static int check_depth(const struct pcow_image *base, const char *image_path,
                       struct pcow_error *error)
{
    unsigned depth = 0;

    for (const struct pcow_image *file = base; file; file = file->base)
        depth++;
    return depth < PCOW_MAX_CHAIN_DEPTH
               ? 0
               : error_set(error, -ELOOP,
                           "%s cannot stand on %s: the chain of that one has %d files already, "
                           "the most there can be; flatten it with pcow-img convert",
                           image_path, base->file.path, PCOW_MAX_CHAIN_DEPTH);
}

int base_record_make(struct base_record *record, const char *image_path, const char *base_path,
                     const char *base_snapshot, bool unchecked, pcow_image **held,
                     struct pcow_error *error)
{
    const char *slash = strrchr(base_path, '/');
    const char *name = slash ? slash + 1 : base_path;
    pcow_image *base = NULL;
    int ret;

    memset(record, 0, sizeof *record);
    *held = NULL;
    if (!base_name_is_safe(name, PCOW_BASE_NAME_SIZE))
        return error_set(
            error, -EINVAL,
            "'%s' is not the name of a base: a file name of at most %d bytes is needed", base_path,
            PCOW_BASE_NAME_SIZE - 1);
    strcpy(record->name, name);
    record->format = 2;
    if (unchecked) {
        if (slash && (ret = same_directory(image_path, base_path, error)))
            return ret;
        if (base_snapshot)
            return error_set(
                error, -EINVAL,
                "a snapshot of the base cannot be recorded without opening the base (-u)");
        record->flags = BASE_UNCHECKED;
        record->crc = base_record_crc(record);
        return 0;
    }
    ret = same_directory(image_path, base_path, error);
    if (ret)
        return ret;
    ret = pcow_open(base_path, 0, base_snapshot, &base, error);
    if (ret == -EMEDIUMTYPE && !base_snapshot) {
        /*
         * The user named this file as a base, so reading it as format 1 guesses between our own two
         * formats only.
         */
        struct pcow_error ignored;

        if (pcow_open(base_path, PCOW_OPEN_FORMAT_1, NULL, &base, &ignored) == 0)
            ret = 0;
    }
    if (ret == -EBUSY && !base_snapshot)
        return error_set(error, ret,
                         "%s is in use; stop what uses it, or make the image on a snapshot of it, "
                         "which can be done while it runs",
                         base_path);
    if (ret)
        return ret;
    ret = check_depth(base, image_path, error);
    if (!ret && base_snapshot)
        ret = pin_set(base, error);
    if (ret) {
        pcow_close(base);
        return ret;
    }
    if (base->format1) {
        record->format = 1;
        record->generation = base->file.size;
    } else {
        memcpy(record->uuid, base->header.uuid, sizeof record->uuid);
        record->generation = word_value(base->header.generation);
        record->layer = base_snapshot ? base->view : 0;
    }
    *held = base;
    record->crc = base_record_crc(record);
    return 0;
}
