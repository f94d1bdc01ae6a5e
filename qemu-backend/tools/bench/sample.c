/* SPDX-License-Identifier: BSD-3-Clause */
#include "sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CLOCK_SAMPLES 4096

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double percentile(double *samples, size_t count, double fraction)
{
    size_t at;

    if (count == 0) {
        return NAN;
    }
    qsort(samples, count, sizeof(*samples), compare);
    at = (size_t)ceil(fraction * (double)count);   /* nearest rank */
    return samples[at > 0 ? at - 1 : 0];
}

double mean(const double *samples, size_t count)
{
    double sum = 0;

    for (size_t i = 0; i < count; i++) {
        sum += samples[i];
    }
    return count ? sum / (double)count : NAN;
}

static void add(struct series *series, double value, double p99, double p999)
{
    if (series->count < MAX_REPEAT) {
        series->value[series->count] = value;
        series->p99[series->count] = p99;
        series->p999[series->count++] = p999;
    }
}

void series_add(struct series *series, double *samples, size_t count, int amortised)
{
    double average = mean(samples, count);
    double median = percentile(samples, count, 0.5);

    add(series, amortised ? average : median, percentile(samples, count, 0.99),
        percentile(samples, count, 0.999));
}

void series_add_value(struct series *series, double value, double p99)
{
    add(series, value, p99, NAN);
}

static double median_of(const double *values, unsigned count)
{
    double copy[MAX_REPEAT];

    memcpy(copy, values, count * sizeof(*values));
    return percentile(copy, count, 0.5);
}

double series_value(const struct series *series)
{
    return median_of(series->value, series->count);
}

double series_p99(const struct series *series)
{
    return median_of(series->p99, series->count);
}

double series_p999(const struct series *series)
{
    return median_of(series->p999, series->count);
}

double clock_overhead_ns(void)
{
    double samples[CLOCK_SAMPLES];

    for (size_t i = 0; i < CLOCK_SAMPLES; i++) {
        uint64_t start = now_ns();

        samples[i] = (double)(now_ns() - start);
    }
    return percentile(samples, CLOCK_SAMPLES, 0.5);
}
