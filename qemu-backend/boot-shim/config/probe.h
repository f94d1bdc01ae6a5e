/* SPDX-License-Identifier: BSD-3-Clause */
/* What lies on a block device. */
#ifndef SHIM_CONFIG_PROBE_H
#define SHIM_CONFIG_PROBE_H

#include "config/volume.h"

/*
 * Fill type, uuid, label and reflink of *volume from its first blocks; the type may be one that
 * cannot be mounted: "LUKS", "LVM", "RAID". False if it is nothing that is known.
 */
bool probe_volume(int fd, struct volume *volume);
/* The identifier of a partition as root=PARTUUID= has it; "" if the disk's table has none. */
void probe_partition(int disk, unsigned partition, char uuid[static 40]);

#endif
