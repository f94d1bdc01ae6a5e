/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A bare trap: a signal handler that makes the system calls of one and nothing else. What pcow
 * takes longer is its own: finding out, deciding, and what has to be on record. What a bare trap
 * takes is the kernel's, and with it the least of every method that maps what was stored to.
 */
#ifndef BENCH_BARE_H
#define BENCH_BARE_H

#include "copies.h"
#include "stores.h"
#include "trap.h"

/*
 * Run the stores of a row in this way; one at a time in a process. The target of the copies is what
 * is mapped.
 */
int bare_run(struct stores *stores, const struct bench *bench, const struct trap_row *row,
             struct copies *copies, struct pcow_error *error);

#endif
