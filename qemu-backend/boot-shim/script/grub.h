/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef SHIM_SCRIPT_GRUB_H
#define SHIM_SCRIPT_GRUB_H

#include "config/menu.h"

/*
 * Fill *menu from a grub.cfg. Leaves through menu->arena->out if the file asks for more than there
 * is. -ENOENT: there is none; -ENOEXEC: it has no entry.
 */
int grub_read(struct menu *menu, const struct volume *volume, const char *path,
              struct failure *failure);

#endif
