/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Random use of a mapped image for a given time, with every byte compared to a model: stores, loads
 * and system calls of several threads, and between them snapshots, reverts, deletions, checks, and
 * opening anew with the next engine.
 */
#ifndef BENCH_SOAK_H
#define BENCH_SOAK_H

#include "bench.h"

#define SOAK_SIZE (UINT64_C(64) << 20)         /* of the image, unless --size says otherwise */

/* What was done; all counts. */
struct soak_report {
    uint64_t seconds, threads, size, seed;
    uint64_t bursts, stores, loads, kernel_writes, kernel_reads, flushes;
    uint64_t snapshots, reverts, deletions, verifications, reopened, checks;
    uint64_t verified_bytes;                   /* compared whole; single loads come on top */
    uint64_t traps, pages_copied, pages_zeroed, slabs_promoted;
    /* of the file, at the last check; leaks: the most at any check */
    uint64_t slabs_used, slabs, leaks;
    uint64_t signal_seconds, minor_seconds, kvm_seconds;     /* time mapped with each engine */
};

/*
 * -EILSEQ if a byte was wrong, -EBADMSG if the check found something.  seed 0: one from the clock.
 */
int soak(struct bench *bench, unsigned seconds, unsigned threads, uint64_t seed,
         struct soak_report *report, struct pcow_error *error);

void print_soak(const struct soak_report *report);
/* path: NULL for stdout.  Returns an exit status. */
int write_soak_json(const struct bench *bench, const struct soak_report *report, const char *path);

#endif
