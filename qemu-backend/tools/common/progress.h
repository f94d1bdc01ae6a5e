/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The progress bar of -p, as qemu-img draws it, and the place where long work learns that it was
 * interrupted.
 */
#ifndef TOOLS_PROGRESS_H
#define TOOLS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    bool enabled;
    double shown;                              /* per cent that the bar shows */
};

/* Draws "    (0.00/100%)" if enabled, and catches signals. */
void progress_begin(struct progress *progress, bool enabled);
/* A pcow_progress_fn; opaque is a struct progress.  Returns -ECANCELED after a signal, else 0. */
int progress_update(void *opaque, uint64_t done, uint64_t total);
/* Completes the bar if the work was done, and ends its line. */
void progress_end(struct progress *progress, bool complete);

#endif
