/* SPDX-License-Identifier: BSD-3-Clause */
/* What engine minor knows of a map, for itself and its tests. */
#ifndef PCOW_MONITOR_ENGINE_MINOR_H
#define PCOW_MONITOR_ENGINE_MINOR_H

#include <stdint.h>

struct minor {
    int fd;                            /* userfaultfd */
    int gain;                          /* a guess of what such slabs are worth in traps; relaxed */
    uint32_t tries;                    /* slabs that were not worth it by that; relaxed */
};

#endif
