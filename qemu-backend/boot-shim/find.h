/* SPDX-License-Identifier: BSD-3-Clause */
/* Which boot loader's configuration a guest has. */
#ifndef SHIM_FIND_H
#define SHIM_FIND_H

#include "config/menu.h"

/*
 * Fill *menu, whose arena and volumes are set. -ENOENT: no volume has a configuration that is
 * known; -ENOEXEC: it boots nothing; -E2BIG: it asks for more than a configuration may.
 */
int find_menu(struct menu *menu, struct failure *failure);

#endif
