/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A file that appears under its name only when it is complete: made under another name beside it,
 * and then renamed.
 */
#ifndef IMG_STAGING_H
#define IMG_STAGING_H

#include <limits.h>
#include <pcow.h>

struct staging {
    char final_path[PATH_MAX];                 /* symbolic links resolved */
    char path[PATH_MAX];                       /* where to make the file; nothing is there yet */
    /* the file that will be replaced, locked; -1: none */
    int replaced;
};

/*
 * -EBUSY: the file exists and is in use; -EROFS: it is a sealed image; -EEXIST: it is not a regular
 * file. From here on nobody else can use it, until the end by one of the next two.
 */
int staging_begin(struct staging *staging, const char *path, struct pcow_error *error);
/*
 * Give the file its name; mode and owner are those of the file that it replaces. On failure it is
 * removed.
 */
int staging_commit(struct staging *staging, struct pcow_error *error);
void staging_abort(struct staging *staging);

#endif
