/* SPDX-License-Identifier: BSD-3-Clause */
/* Modules of the guest's kernel. */
#ifndef SHIM_MACHINE_MODULE_H
#define SHIM_MACHINE_MODULE_H

#include "config/menu.h"

#define MODULES_MAX 64

struct modules {
    const char *path[MODULES_MAX]; /* as modules.dep has them, what is needed first */
    size_t count;
};

/*
 * Add a module and what it needs, from the text of a modules.dep; false if it is not there, or
 * needs too many.
 */
bool modules_add(struct arena *arena, struct modules *modules, const char *dependencies,
                 const char *name);

/* Whether a list of paths (modules.builtin, modules.dep) has a module of that name. */
bool modules_listed(const char *list, const char *name);

/*
 * Unpack what may be compressed: .ko.xz, .ko.zst, .ko.gz. NULL if it cannot be. *length is that of
 * the data, then of the result.
 */
char *module_unpack(struct arena *arena, const char *path, char *data, size_t *length);

#endif
