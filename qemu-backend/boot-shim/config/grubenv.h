/* SPDX-License-Identifier: BSD-3-Clause */
/* GRUB's environment block: a file of 1024 bytes that it changes without writing a file system. */
#ifndef SHIM_CONFIG_GRUBENV_H
#define SHIM_CONFIG_GRUBENV_H

#include <stdbool.h>
#include <stddef.h>

#include "config/arena.h"

#define GRUBENV_MAX ((size_t)64 << 10)

typedef void grubenv_seen(void *context, const char *name, const char *value);

/* Call seen() for each variable; false if it is no environment block. */
bool grubenv_read(struct arena *arena, const char *data, size_t length, grubenv_seen *seen,
                  void *context);
/*
 * The block with a variable changed, or without it (value NULL), of the same length; NULL if it is
 * no block or has no room.
 */
char *grubenv_change(struct arena *arena, const char *data, size_t length, const char *name,
                     const char *value);

#endif
