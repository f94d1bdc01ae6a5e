/* SPDX-License-Identifier: BSD-3-Clause */
/* What systemd-boot would show: entries of /loader/entries and unified kernel images. */
#ifndef SHIM_CONFIG_LOADER_H
#define SHIM_CONFIG_LOADER_H

#include "config/menu.h"

/* -ENOENT: no volume has an entry. */
int loader_read(struct menu *menu, struct failure *failure);
/* Whether systemd-boot is what the firmware would start. */
bool loader_installed(const struct volumes *volumes);
/* '*' and '?'. */
bool loader_matches(const char *pattern, const char *name);

#endif
