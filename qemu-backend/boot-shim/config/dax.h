/* SPDX-License-Identifier: BSD-3-Clause */
/* Whether the guest's root can be mapped as it lies in persistent memory (DAX). */
#ifndef SHIM_CONFIG_DAX_H
#define SHIM_CONFIG_DAX_H

#include "config/volume.h"

struct dax {
    const char *option; /* of the mount; NULL: without */
    const char *why; /* it is without, or in small pages; NULL: there is nothing to say */
    /*
     * For first-init, of a partition whose end the guest's kernel must be told: disk, number, and
     * start and size by the table in sectors of 512 bytes. NULL: there is nothing to do.
     */
    const char *cut;
};

/*
 * root: NULL if nobody knows which it is. version: of the guest's kernel, 6001 for 6.1. fs_dax:
 * whether that was built with it. initrd: whether it has one, in which first-init runs.
 */
struct dax dax_choose(struct arena *arena, const struct volume *root, unsigned version,
                      bool fs_dax, bool initrd);

#endif
