/* SPDX-License-Identifier: BSD-3-Clause */
#include "operations/operations.h"
#include "snapshot/pin.h"

int pcow_snapshot_unpin(const char *path, const char *name, struct pcow_error *error)
{
    pcow_image *image;
    int ret = pcow_open(path, PCOW_OPEN_NO_BASE, name, &image, error);

    if (ret)
        return ret;
    ret = pin_clear(image, name, error);
    pcow_close(image);
    return ret;
}
