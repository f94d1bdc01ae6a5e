/* SPDX-License-Identifier: BSD-3-Clause */
#include "snapshot/tree.h"

struct layer *snapshot_find(struct pcow_image *image, const char *name, struct pcow_error *error)
{
    struct layer *layer = image->format1 ? NULL : layer_find_name(image, name);

    if (!layer)
        layer_name_unknown(image, name, error);
    return layer;
}
