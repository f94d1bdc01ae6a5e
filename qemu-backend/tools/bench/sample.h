/* SPDX-License-Identifier: BSD-3-Clause */
/* Samples of one repetition, and the median over repetitions. */
#ifndef BENCH_SAMPLE_H
#define BENCH_SAMPLE_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define MAX_REPEAT 1000

/* Values of the repetitions of one side of a row. */
struct series {
    double value[MAX_REPEAT], p99[MAX_REPEAT], p999[MAX_REPEAT];
    unsigned count;
};

static inline uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Sorts the samples; fraction 0.5 is the median. */
double percentile(double *samples, size_t count, double fraction);
double mean(const double *samples, size_t count);

/* One repetition: its median (or, amortised, its mean), p99 and p99.9.  Sorts the samples. */
void series_add(struct series *series, double *samples, size_t count, int amortised);
/* One repetition that is a single measurement; it has no p99.9. */
void series_add_value(struct series *series, double value, double p99);
/* Median over the repetitions; NAN if there were none. */
double series_value(const struct series *series);
double series_p99(const struct series *series);
double series_p999(const struct series *series);

/* What a pair of now_ns() calls measures when nothing lies between. */
double clock_overhead_ns(void);

#endif
