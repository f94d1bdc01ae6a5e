/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/beside_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "image/mirror.h"
#include "util/error.h"

int beside_writer_open(const struct pcow_image *image, struct file *file, struct pcow_error *error)
{
    char link[64];
    int ret;

    if (image->header.read_only_compatible_features & ~FEATURES_KNOWN)
        return error_set(error, -ENOTSUP,
                         "%s uses features (0x%llx) that this program can read but not write, so "
                         "nothing can be noted of its snapshot; use a newer pcow",
                         image->file.path,
                         (unsigned long long)image->header.read_only_compatible_features);
    snprintf(link, sizeof link, "/proc/self/fd/%d", image->file.fd);
    ret = file_open(file, AT_FDCWD, link, image->file.path, FILE_WRITE | FILE_FORCE_SHARE,
                    image->file.persist.observer, error);
    /* -EPERM: it is immutable, which the error tells with the way out. */
    if (ret == -EACCES || ret == -EROFS)
        error_set_errno(error, ret,
                        "%s: something is to be noted of its snapshot (that an image stands on it, "
                        "or checksums), which needs write permission",
                        image->file.path);
    return ret;
}

int beside_writer_attach(struct file *file, struct pcow_error *error)
{
    struct header header;
    int ret = file_read(file, 0, &header, sizeof header);

    if (ret)
        return error_set_errno(error, ret, "cannot read the header of %s", file->path);
    ret = header_validate(&header, file->path, error);
    if (ret)
        return ret;
    if (word_value(header.state) & HEADER_AMENDING)
        return error_set(error, -EBUSY,
                         "%s is getting a mirror of its metadata; finish that first (pcow-img "
                         "amend -o mirror=on)",
                         file->path);
    return mirror_attach(file, &header) ? error_set(error, -ENOMEM, "out of memory") : 0;
}
