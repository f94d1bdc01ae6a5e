/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Timed stores to the pages of a range, by one or more threads, and the proof that they and nothing
 * else changed it.
 */
#ifndef BENCH_STORES_H
#define BENCH_STORES_H

#include "sides.h"
#include "trap.h"

struct stores {
    struct visits visits;
    unsigned threads;
    uint64_t pages;                            /* of the range */
    double clock_ns;
    double *samples;                           /* ns for each visit, filled by stores_run() */
    uint8_t *stored;                           /* by page: 1 if it is stored to */
    uint8_t *memory;                           /* of the run in progress */
};

int stores_begin(struct stores *stores, const struct bench *bench, enum visit visit,
                 uint64_t cluster_size, unsigned threads, uint64_t seed, struct pcow_error *error);
void stores_end(struct stores *stores);

/* The loads or stores that are not timed. */
void stores_warm(const struct stores *stores, uint8_t *memory);
/* Time every store. */
int stores_run(struct stores *stores, uint8_t *memory, struct pcow_error *error);
/*
 * -EILSEQ if a byte is wrong; what: the side, for the message. patterned: pages held page_pattern()
 * before, else zeros.
 */
int stores_verify(const struct stores *stores, const char *what, const uint8_t *memory,
                  bool patterned, bool every_page, struct pcow_error *error);

/* The raw file and, if asked for, the base image of this run; made once. */
int ensure_content(const struct bench *bench, bool base, struct pcow_error *error);
/* The base image still holds what was written to it. */
int verify_base(const struct bench *bench, const char *row, struct pcow_error *error);

#endif
