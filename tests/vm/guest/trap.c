/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Debug exceptions: Linux gives them a stack of their own (IST), to which the processor stores, and
 * no register or instruction points.
 */
#define _GNU_SOURCE
#include "guest.h"

#include <sched.h>

static volatile sig_atomic_t traps;

static void handle_trap(int number)
{
    (void)number;
    traps++;
}

bool trap_on_each_cpu(unsigned cpus, FILE *out)
{
    struct sigaction before, action = { .sa_handler = handle_trap };
    cpu_set_t all;
    bool ok =
        sched_getaffinity(0, sizeof(all), &all) == 0 && sigaction(SIGTRAP, &action, &before) == 0;

    traps = 0;
    for (unsigned cpu = 0; cpu < cpus && ok; cpu++) {
        cpu_set_t one;

        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        ok = sched_setaffinity(0, sizeof(one), &one) == 0;
        if (ok) {
            __asm__ volatile(".byte 0xf1" : : : "memory");     /* int1 */
        }
    }
    if (!ok || sched_setaffinity(0, sizeof(all), &all) < 0
        || sigaction(SIGTRAP, &before, NULL) < 0) {
        fprintf(out, "cannot move between CPUs, or handle SIGTRAP");
        return false;
    }
    if (traps != (sig_atomic_t)cpus) {
        fprintf(out, "%d debug exceptions on %u CPUs", (int)traps, cpus);
        return false;
    }
    return true;
}
