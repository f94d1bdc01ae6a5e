/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef SHIM_MACHINE_SAVES_H
#define SHIM_MACHINE_SAVES_H

#include "config/menu.h"

/*
 * Write what GRUB's save_env asked for, in the blocks that the file has, as GRUB does. Says what
 * cannot be written.
 */
void saves_write(struct arena *arena, const struct save *saves);

#endif
