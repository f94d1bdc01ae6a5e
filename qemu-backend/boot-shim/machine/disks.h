/* SPDX-License-Identifier: BSD-3-Clause */
/* The guest's disks: NVDIMMs and virtio-pmem devices. */
#ifndef SHIM_MACHINE_DISKS_H
#define SHIM_MACHINE_DISKS_H

#include <stdbool.h>

#include "config/volume.h"

/*
 * Mount the file systems of all disks that were not seen before, read-only and without their
 * journals: nothing is written to the guest. Says what it cannot look into.
 * Returns how many disks there are.
 */
size_t disks_find(struct volumes *volumes);

/* Whether the machine has virtio-pmem devices, and NVDIMMs that ACPI knows of. */
bool machine_has_virtio_pmem(void);
bool machine_has_nvdimm(void);

#endif
