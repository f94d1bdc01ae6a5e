/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/tree.h"

#include <errno.h>

#include "util/error.h"

struct layer *snapshot_find(struct pcow_image *image, const char *name, struct pcow_error *error)
{
    struct layer *layer = image->format1 ? NULL : layer_find_name(image, name);

    if (!layer)
        error_set(error, -ENOENT, "%s has no snapshot '%s'; pcow-img snapshot -l lists them",
                  image->file.path, name);
    return layer;
}
