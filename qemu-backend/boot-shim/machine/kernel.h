/* SPDX-License-Identifier: BSD-3-Clause */
/* The guest's kernel. */
#ifndef SHIM_MACHINE_KERNEL_H
#define SHIM_MACHINE_KERNEL_H

#include <stdbool.h>
#include <stddef.h>

#include "config/fail.h"

struct kernel {
    int fd;
    char release[128]; /* as uname -r says it; "" if the file does not tell */
    unsigned major, minor;
    size_t options_max; /* length of a command line */
};

/* Look at a file; -ENOEXEC and words if this machine cannot boot it. */
int kernel_look(int fd, const char *path, struct kernel *kernel, struct failure *failure);
/* Load it (@initrd may be -1); kernel_start() then does not return unless it fails. */
int kernel_load(const struct kernel *kernel, int initrd, const char *options,
                struct failure *failure);
int kernel_start(struct failure *failure);

#endif
