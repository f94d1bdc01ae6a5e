/* SPDX-License-Identifier: BSD-3-Clause */
/* A process that outlives the measurement, so that its files go away whatever happens to it. */
#ifndef BENCH_GUARD_H
#define BENCH_GUARD_H

/*
 * Runs work(opaque) in a child and returns its exit status; EXIT_FAILURE with a report if a signal
 * ended it.
 */
int run_guarded(int (*work)(void *opaque), void *opaque);

#endif
