/* SPDX-License-Identifier: BSD-3-Clause */
/* The drivers that a guest's kernel needs for a root on an NVDIMM, taken from the guest itself. */
#ifndef SHIM_MACHINE_GUEST_MODULES_H
#define SHIM_MACHINE_GUEST_MODULES_H

#include "machine/module.h"

struct guest_modules {
    const struct volume *volume;
    const char *directory; /* of the kernel's modules; NULL: it was not found */
    struct modules modules; /* to be loaded, in this order; none if the kernel has all built in */
    bool fs_dax; /* nothing says that the kernel cannot do DAX */
};

/*
 * -ENODEV and words if this kernel has no driver. @release is what uname -r says of it; @virtio
 * that the device is virtio-pmem.
 */
int guest_modules_find(struct arena *arena, const struct volumes *volumes, const char *release,
                       bool virtio, struct guest_modules *found, struct failure *failure);

#endif
