/* SPDX-License-Identifier: BSD-3-Clause */
#include "soak_threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "interrupt.h"
#include "report.h"
#include "sides.h"

#define LINE 64u
#define LINES_PER_PAGE (PCOW_PAGE_SIZE / LINE)
#define RUN_PAGES 32u                          /* the longest run of neighbouring pages */
#define LOOK_EVERY 256u                        /* operations between two looks whether to end */

struct worker {
    pthread_t thread;
    const struct soak_burst *burst;
    unsigned number;
    /* home: a page around which half of its accesses are */
    uint64_t seed, home;
    struct soak_report done;
    struct pcow_error error;
};

/* One of this thread's lines in a page. */
static uint64_t line_in(struct worker *worker, uint64_t page)
{
    unsigned mine = LINES_PER_PAGE / worker->burst->threads;
    uint64_t nth = random_next(&worker->seed) % mine;

    return page * PCOW_PAGE_SIZE + (nth * worker->burst->threads + worker->number) * LINE;
}

static uint64_t choose_page(struct worker *worker)
{
    uint64_t pages = worker->burst->size / PCOW_PAGE_SIZE, random = random_next(&worker->seed);

    return random & 1 ? (random >> 1) % pages : (worker->home + (random >> 1) % RUN_PAGES) % pages;
}

static int compare(struct worker *worker, uint64_t offset)
{
    worker->done.loads++;
    if (memcmp(worker->burst->memory + offset, worker->burst->model + offset, LINE) == 0) {
        return 0;
    }
    return fail(&worker->error, -EILSEQ, "soak: offset %llu does not hold what was stored there",
                (unsigned long long)offset);
}

static void store_words(struct worker *worker, uint64_t offset, unsigned words)
{
    volatile uint64_t *memory = (volatile uint64_t *)(worker->burst->memory + offset);
    uint64_t *model = (uint64_t *)(worker->burst->model + offset);
    unsigned first = words < LINE / 8 ? (unsigned)(random_next(&worker->seed) % (LINE / 8)) : 0;

    for (unsigned i = first; i < first + words && i < LINE / 8; i++) {
        model[i] = random_next(&worker->seed);
        memory[i] = model[i];
    }
    worker->done.stores++;
}

/*
 * The kernel stores to the range, or loads from it; it gets no signal, so the range is made ready
 * before.
 */
static int kernel_access(struct worker *worker, uint64_t offset, bool write)
{
    const struct soak_burst *burst = worker->burst;
    uint64_t from = random_next(&worker->seed) % (SOAK_SOURCE_SIZE / LINE) * LINE;
    uint64_t place = SOAK_SOURCE_SIZE + worker->number * LINE;
    int r = pcow_map_resolve(burst->map, offset, LINE, write, &worker->error);
    uint8_t copy[LINE];

    if (r) {
        return r;
    }
    if (write) {
        if (pread(burst->source, burst->memory + offset, LINE, (off_t)from) != (ssize_t)LINE) {
            return fail(&worker->error, -errno, "soak: the kernel cannot store to offset %llu: %s",
                        (unsigned long long)offset, strerror(errno));
        }
        memcpy(burst->model + offset, burst->source_bytes + from, LINE);
        worker->done.kernel_writes++;
        return 0;
    }
    /* Into the same file, behind the source, and back. */
    if (pwrite(burst->source, burst->memory + offset, LINE, (off_t)place) != (ssize_t)LINE
        || pread(burst->source, copy, LINE, (off_t)place) != (ssize_t)LINE) {
        return fail(&worker->error, -errno, "soak: the kernel cannot load from offset %llu: %s",
                    (unsigned long long)offset, strerror(errno));
    }
    worker->done.kernel_reads++;
    return memcmp(copy, burst->model + offset, LINE) == 0
               ? 0
               : fail(&worker->error, -EILSEQ, "soak: the kernel read wrong data at offset %llu",
                      (unsigned long long)offset);
}

/* This thread's line in each of a run of pages. */
static void store_run(struct worker *worker, uint64_t page)
{
    uint64_t pages = worker->burst->size / PCOW_PAGE_SIZE,
             count = 1 + random_next(&worker->seed) % RUN_PAGES;

    for (uint64_t i = 0; i < count && page + i < pages; i++) {
        store_words(worker, line_in(worker, page + i), LINE / 8);
    }
}

static int operate(struct worker *worker)
{
    const struct soak_burst *burst = worker->burst;
    uint64_t page = choose_page(worker), offset = line_in(worker, page);
    unsigned kind = (unsigned)(random_next(&worker->seed) % 100);

    if (kind < 40) {
        store_words(worker, offset, 1);
    } else if (kind < 50) {
        store_words(worker, offset, LINE / 8);
    } else if (kind < 52) {
        store_run(worker, page);
    } else if (kind < 54) {
        return kernel_access(worker, offset, true);
    } else if (kind < 56) {
        return kernel_access(worker, offset, false);
    } else if (kind < 57) {
        worker->done.flushes++;
        return pcow_map_flush(burst->map, page * PCOW_PAGE_SIZE, PCOW_PAGE_SIZE, &worker->error);
    } else {
        return compare(worker, offset);
    }
    return 0;
}

static void *work(void *opaque)
{
    struct worker *worker = opaque;
    int r = 0;

    for (unsigned i = 0; i < worker->burst->operations && !r; i++) {
        r = operate(worker);
        if (i % LOOK_EVERY == 0 && interrupt_pending()) {
            break;
        }
    }
    return NULL;
}

static void add(struct soak_report *report, const struct soak_report *done)
{
    report->stores += done->stores;
    report->loads += done->loads;
    report->kernel_writes += done->kernel_writes;
    report->kernel_reads += done->kernel_reads;
    report->flushes += done->flushes;
}

int soak_run_burst(const struct soak_burst *burst, struct soak_report *report,
                   struct pcow_error *error)
{
    struct worker *workers = calloc(burst->threads, sizeof(*workers));
    uint64_t seed = burst->seed;
    unsigned begun = 0;
    int r = workers ? 0 : fail(error, -ENOMEM, "out of memory");

    while (!r && begun < burst->threads) {
        struct worker *worker = &workers[begun];

        *worker = (struct worker){.burst = burst, .number = begun, .seed = random_next(&seed),
                                  .home = random_next(&seed) % (burst->size / PCOW_PAGE_SIZE)};
        r = -pthread_create(&worker->thread, NULL, work, worker);
        if (r) {
            fail(error, r, "cannot start a thread: %s", strerror(-r));
        }
        begun += r == 0;
    }
    for (unsigned i = 0; i < begun; i++) {
        pthread_join(workers[i].thread, NULL);
        add(report, &workers[i].done);
        if (!r && workers[i].error.code) {
            *error = workers[i].error;
            r = error->code;
        }
    }
    free(workers);
    return r;
}
