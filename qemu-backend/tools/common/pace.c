/* SPDX-License-Identifier: BSD-3-Clause */
#include "pace.h"

#include <errno.h>
#include <time.h>

#include "interrupt.h"

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* A signal ends it. */
static void sleep_for(double seconds)
{
    struct timespec time = {.tv_sec = (time_t)seconds};

    time.tv_nsec = (long)((seconds - (double)time.tv_sec) * 1e9);
    nanosleep(&time, NULL);
}

int pace_update(void *opaque, uint64_t done, uint64_t total)
{
    struct pace *pace = opaque;

    if (pace->rate) {
        double due = (double)done / (double)pace->rate, passed;

        if (!pace->begun) {
            pace->begun = now();
        }
        passed = now() - pace->begun;
        if (due > passed && !interrupt_pending()) {
            sleep_for(due - passed);
        }
    }
    return progress_update(&pace->progress, done, total);
}
