/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef SHIM_CONFIG_EXTLINUX_H
#define SHIM_CONFIG_EXTLINUX_H

#include "config/menu.h"

/* Fill *menu from an extlinux.conf; see grub_read(). */
int extlinux_read(struct menu *menu, const struct volume *volume, const char *path,
                  struct failure *failure);

#endif
