/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * memcpy() from one file of the pool to another, both written before and in the page table: what a
 * copy on a trap takes at least.
 */
#ifndef BENCH_COPIES_H
#define BENCH_COPIES_H

#include "sides.h"

struct copies {
    struct raw source, target;
    double *samples;
    uint64_t seed;
};

int copies_begin(struct copies *copies, const struct bench *bench, struct pcow_error *error);
/* Nanoseconds for a piece of so many bytes, the median of many between random places. */
double copies_time(struct copies *copies, const struct bench *bench, uint64_t piece);
/* Also after a copies_begin() that failed. */
void copies_end(struct copies *copies, const struct bench *bench);

#endif
