/* SPDX-License-Identifier: BSD-3-Clause */
/* The guest's kernel. */
#ifndef SHIM_MACHINE_KERNEL_H
#define SHIM_MACHINE_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "config/fail.h"

/* Bytes in this program's memory. */
struct piece {
    const void *data;
    size_t size;
};

struct kernel {
    struct piece file;
    char release[128]; /* as uname -r says it; "" if the file does not tell */
    unsigned major, minor;
    size_t options_max; /* length of a command line */
    uint64_t address; /* where it wants to lie */
    uint64_t room; /* what it needs there until it has unpacked itself */
    uint64_t initrd_max; /* the last address that an initrd may have */
    size_t setup_size; /* what comes before the kernel proper */
};

/* Look at a file; -ENOEXEC and words if this machine cannot boot it. */
int kernel_look(const struct piece *file, const char *path, struct kernel *kernel,
                struct failure *failure);
/*
 * Load it with an initrd in pieces, between which there may be zeros; kernel_start() then does not
 * return unless it fails.
 */
int kernel_load(const struct kernel *kernel, const struct piece *initrd, size_t count,
                const char *options, struct failure *failure);
int kernel_start(struct failure *failure);

#endif
