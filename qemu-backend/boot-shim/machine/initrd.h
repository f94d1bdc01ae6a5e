/* SPDX-License-Identifier: BSD-3-Clause */
/* What is given to the guest's kernel. */
#ifndef SHIM_MACHINE_INITRD_H
#define SHIM_MACHINE_INITRD_H

#include "machine/guest_modules.h"
#include "machine/kernel.h"

#define FIRST_INIT "/pcow/init"

/* A file, or the part of one, as memory; for good, as what follows is another kernel. */
int boot_file_map(const struct boot_file *file, struct piece *piece, struct failure *failure);

/* The program that runs first in the guest's initramfs. */
struct first_init {
    const char *program; /* its path in the shim */
    const char *next; /* what it shall run (rdinit= of the guest); NULL: /init */
    const char *cut; /* of struct dax; or NULL */
};

/*
 * The choice's initrds, in front of them the first program with the guest's modules, if it has
 * something to do. @pieces has room for INITRDS_MAX + 1.
 */
int initrd_make(struct arena *arena, const struct choice *choice,
                const struct guest_modules *modules, const struct first_init *first,
                struct piece *pieces, size_t *count, struct failure *failure);

#endif
