/* SPDX-License-Identifier: BSD-3-Clause */
/* Work on one or more threads, each on a CPU of its own where there are enough, begun together. */
#ifndef BENCH_THREADS_H
#define BENCH_THREADS_H

#include <pcow.h>

/* Runs work(opaque, 0) ... work(opaque, count - 1) and waits for all. */
int run_threads(unsigned count, void (*work)(void *opaque, unsigned thread), void *opaque,
                struct pcow_error *error);

/* CPUs that this process may run on. */
unsigned usable_cpus(void);

#endif
