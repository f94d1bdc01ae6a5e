/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The threads of a soak. Every line of 64 bytes belongs to one thread, line by line in turn, so
 * that all threads meet in every page and yet each knows what must be in its lines.
 */
#ifndef BENCH_SOAK_THREADS_H
#define BENCH_SOAK_THREADS_H

#include "bench.h"
#include "soak.h"

#define MAX_SOAK_THREADS 64u

struct soak_burst {
    pcow_map *map;
    uint8_t *memory, *model;
    uint64_t size;
    unsigned threads;
    uint64_t seed;                             /* each thread makes its own of it */
    unsigned operations;                       /* of each thread */
    /* a file with SOAK_SOURCE_SIZE bytes, which are also at source_bytes */
    int source;
    const uint8_t *source_bytes;
};

#define SOAK_SOURCE_SIZE (UINT64_C(1) << 20)

/*
 * Run the threads to their end and add to report.  -EILSEQ: a load did not return what was stored.
 */
int soak_run_burst(const struct soak_burst *burst, struct soak_report *report,
                   struct pcow_error *error);

#endif
