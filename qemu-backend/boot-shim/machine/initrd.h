/* SPDX-License-Identifier: BSD-3-Clause */
/* What is given to the guest's kernel. */
#ifndef SHIM_MACHINE_INITRD_H
#define SHIM_MACHINE_INITRD_H

#include "machine/guest_modules.h"
#include "machine/kernel.h"

#define FIRST_INIT "/pcow/init"

/* A file, or the part of one, as memory; for good, as what follows is another kernel. */
int boot_file_map(const struct boot_file *file, struct piece *piece, struct failure *failure);

/*
 * The choice's initrds, in front of them the guest's modules and the program that loads them (its
 * path in the shim: @first_init), if there are any. @next is what that program shall run (rdinit=
 * of the guest; NULL: /init). @pieces has room for INITRDS_MAX + 1.
 */
int initrd_make(struct arena *arena, const struct choice *choice,
                const struct guest_modules *modules, const char *first_init, const char *next,
                struct piece *pieces, size_t *count, struct failure *failure);

#endif
