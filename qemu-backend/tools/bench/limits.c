/* SPDX-License-Identifier: BSD-3-Clause */
/* What the hardware and the kernel take on this machine, in this run. */
#include <errno.h>
#include <immintrin.h>
#include <stdlib.h>

#include "copies.h"
#include "report.h"
#include "sample.h"
#include "stores.h"

#define FLUSHES 4096u                          /* for each repetition */
#define MAX_REPETITIONS 15u
#define SEED UINT64_C(0x6c696d69)

/* These are steadier than the rows. */
static unsigned repetitions(const struct bench *bench)
{
    return bench->repeat < MAX_REPETITIONS ? bench->repeat : MAX_REPETITIONS;
}

static int measure_faults(struct bench *bench, unsigned threads, struct pcow_error *error)
{
    struct series *series = calloc(1, sizeof(*series));
    struct stores stores;
    int r = series ? stores_begin(&stores, bench, VISIT_ONE_PER_CLUSTER, PCOW_DEFAULT_CLUSTER_SIZE,
                                  threads, SEED, error)
                   : fail(error, -ENOMEM, "out of memory");

    for (unsigned repetition = 0; repetition < repetitions(bench) && !r; repetition++) {
        struct raw raw;

        r = bench_need(bench, 0, error);
        r = r ? r : raw_map(bench, RAW_FILE, &raw, error);
        if (r) {
            break;
        }
        r = stores_run(&stores, raw.memory, error);
        if (!r) {
            series_add(series, stores.samples, stores.visits.count, 0);
            raw_restore(&raw);
        }
        raw_unmap(&raw);
    }
    if (series) {
        bench->limits.fault_ns[threads - 1] = r ? 0 : series_value(series);
        stores_end(&stores);
    }
    free(series);
    return r;
}

static double time_flushes(const struct bench *bench, uint8_t *memory, uint64_t size,
                           double *samples, uint64_t *seed)
{
    for (size_t i = 0; i < FLUSHES; i++) {
        volatile uint64_t *line =
            (volatile uint64_t *)(memory + random_next(seed) % (size / 64) * 64);
        uint64_t start;

        /* The line is in the cache: what is timed is its way to memory. */
        (void)*line;
        start = now_ns();
        *line = i;
        bench->flush_lines((const void *)line, sizeof(*line));
        _mm_sfence();
        _mm_mfence();                          /* the clock does not wait for stores; this does */
        samples[i] = (double)(now_ns() - start) - bench->limits.clock_ns;
    }
    return percentile(samples, FLUSHES, 0.5);
}

static int measure_copies(struct bench *bench, struct pcow_error *error)
{
    static const uint64_t pieces[3] = {PCOW_PAGE_SIZE, PCOW_DEFAULT_CLUSTER_SIZE, PCOW_SLAB_SIZE};
    double *const results[3] = {&bench->limits.memcpy_4k_ns, &bench->limits.memcpy_64k_ns,
                                &bench->limits.memcpy_2m_ns};
    double *samples = calloc(FLUSHES, sizeof(*samples));
    struct series *series = calloc(4, sizeof(*series));
    uint64_t seed = SEED;
    struct copies copies;
    int r = copies_begin(&copies, bench, error);

    if (!r && (!samples || !series)) {
        r = fail(error, -ENOMEM, "out of memory");
    }
    for (unsigned repetition = 0; repetition < repetitions(bench) && !r; repetition++) {
        for (unsigned i = 0; i < 3; i++) {
            series_add_value(&series[i], copies_time(&copies, bench, pieces[i]), 0);
        }
        series_add_value(&series[3],
                         time_flushes(bench, copies.target.memory, bench->size, samples, &seed), 0);
        r = bench_need(bench, 0, error);
    }
    for (unsigned i = 0; i < 3 && !r; i++) {
        *results[i] = series_value(&series[i]);
    }
    bench->limits.flush_line_ns = r ? 0 : series_value(&series[3]);
    copies_end(&copies, bench);
    free(samples);
    free(series);
    return r;
}

int measure_limits(struct bench *bench, struct pcow_error *error)
{
    int r;

    bench->limits.clock_ns = clock_overhead_ns();
    r = ensure_content(bench, false, error);
    for (unsigned threads = 1; threads <= MAX_THREADS && !r; threads++) {
        r = measure_faults(bench, threads, error);
    }
    return r ? r : measure_copies(bench, error);
}
