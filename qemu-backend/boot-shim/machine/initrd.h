/* SPDX-License-Identifier: BSD-3-Clause */
/* What is given to the guest's kernel: files in memory. */
#ifndef SHIM_MACHINE_INITRD_H
#define SHIM_MACHINE_INITRD_H

#include "machine/guest_modules.h"

#define FIRST_INIT "/pcow/init"

/*
 * A file in memory with the choice's initrds behind one another, in front of them the guest's
 * modules and the program that loads them (its path in the shim: @first_init), if there are any.
 * @next is what that program shall run (rdinit= of the guest; NULL: /init). A negative errno and
 * words.
 */
int initrd_make(struct arena *arena, const struct choice *choice,
                const struct guest_modules *modules, const char *first_init, const char *next,
                struct failure *failure);
/* A descriptor of the file, or of a copy of that part of it. */
int boot_file_open(const struct boot_file *file, struct failure *failure);

#endif
