/* SPDX-License-Identifier: BSD-3-Clause */
#include "unfinished.h"

#include <errno.h>
#include <stdio.h>

int check_no_revert(const pcow_image *image, struct pcow_error *error)
{
    char mark[PCOW_SNAPSHOT_NAME_SIZE];

    if (!pcow_snapshot_find_prefix(image, UNFINISHED_REVERT, mark)) {
        return 0;
    }
    error->code = -EBUSY;
    snprintf(error->message, sizeof(error->message),
             "a revert of the whole VM ended halfway, %s has its snapshot as '%s': start the VM to "
             "have it finished, or give that virsh "
             "snapshot-revert again; or, to take the image as it is, rename that snapshot "
             "(pcow-img snapshot --rename)",
             pcow_path(image), mark);
    return error->code;
}
