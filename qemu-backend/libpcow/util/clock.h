/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef PCOW_UTIL_CLOCK_H
#define PCOW_UTIL_CLOCK_H

#include <stdint.h>
#include <time.h>

/* The monotonic clock. Async-signal-safe. */
static inline uint64_t clock_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
