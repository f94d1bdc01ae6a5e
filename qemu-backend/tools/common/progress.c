/* SPDX-License-Identifier: BSD-3-Clause */
#include "progress.h"

#include <errno.h>
#include <stdio.h>

#include "interrupt.h"

static void draw(struct progress *progress, double percent)
{
    progress->shown = percent;
    printf("    (%3.2f/100%%)\r", percent);
    fflush(stdout);
}

void progress_begin(struct progress *progress, bool enabled)
{
    interrupt_catch();
    progress->enabled = enabled;
    if (enabled) {
        draw(progress, 0);
    }
}

int progress_update(void *opaque, uint64_t done, uint64_t total)
{
    struct progress *progress = opaque;
    double percent = total ? 100.0 * (double)done / (double)total : 100.0;

    if (progress->enabled && percent >= progress->shown + 1) {
        draw(progress, percent);
    }
    return interrupt_pending() ? -ECANCELED : 0;
}

void progress_end(struct progress *progress, bool complete)
{
    if (progress->enabled) {
        if (complete) {
            draw(progress, 100);
        }
        putchar('\n');
        fflush(stdout);
    }
}
