/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A pool whose files are mapped with huge pages, for rows about these: a tmpfs that only this
 * process sees and that ends with it. On fsdax the pool itself maps huge pages, and the ordinary
 * rows tell.
 */
#ifndef BENCH_HUGE_H
#define BENCH_HUGE_H

#include "bench.h"

/*
 * Make it where the files of this run lie. False if it cannot be had: bench->huge_problem says why.
 */
bool huge_pool_enter(struct bench *bench);
/* Go back; what was left in it is gone. */
void huge_pool_leave(struct bench *bench);

#endif
