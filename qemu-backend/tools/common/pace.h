/* SPDX-License-Identifier: BSD-3-Clause */
/* Long work that leaves the medium to others: no more than so many bytes a second. */
#ifndef TOOLS_PACE_H
#define TOOLS_PACE_H

#include <stdint.h>

#include "progress.h"

struct pace {
    struct progress progress;
    uint64_t rate;                             /* bytes a second, 0: as fast as it goes */
    double begun;                              /* seconds of the monotonic clock; 0: not yet */
};

/* A pcow_progress_fn; opaque is a struct pace whose progress has begun. */
int pace_update(void *opaque, uint64_t done, uint64_t total);

#endif
