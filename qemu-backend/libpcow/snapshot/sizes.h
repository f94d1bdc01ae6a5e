/* SPDX-License-Identifier: BSD-3-Clause */
/* What each snapshot holds, shares and keeps from being free. */
#ifndef PCOW_SNAPSHOT_SIZES_H
#define PCOW_SNAPSHOT_SIZES_H

#include "image/image.h"

/*
 * Fill data_size, shared_size and delete_frees of a list by ascending id. One pass over the slabs,
 * sorted. -ENOMEM.
 */
int sizes_fill(const struct pcow_image *image, struct pcow_snapshot *list, size_t count);

#endif
