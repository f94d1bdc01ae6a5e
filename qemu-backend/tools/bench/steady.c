/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Steady state: random accesses to a chain on which every page has been written, against the raw mapping of a file with the
 * same content.  The sides take turns batch by batch; a batch is timed as a whole, p99 comes from accesses timed one by one.
 */
#include <errno.h>
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "chain.h"
#include "interrupt.h"
#include "report.h"
#include "sample.h"
#include "threads.h"

#define BATCH 2048u
#define BATCHES 32u                            /* for each repetition and side */
#define AT_MOST (1 / 0.98)                     /* at least 0.98 of raw's speed */
#define SLACK (UINT64_C(256) << 20)
#define SEED UINT64_C(0x73746561)
#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))

/* The value is also what a store leaves behind: see chain_word(). */
enum access { READ_PAGE = CHAIN_FREE, WRITE_PAGE, STORE_FLUSH };

struct steady {
    struct bench *bench;
    enum access access;
    uint8_t *memory[2];                        /* raw, pcow */
    uint64_t pages;
    uint64_t *order;                           /* BATCH pages */
    uint64_t *buffer;
    uint64_t wrong;                            /* page numbers that did not fit to the page */
    uint8_t *visited;                          /* by page */
    double *samples;                           /* BATCH */
    double *batches[2];                        /* BATCHES */
    struct series series[2];
};

/* Another line of each page, so that not all of them fall into the same sets of the caches. */
static inline uint64_t *line_of(uint64_t *words, uint64_t page)
{
    return words + page % (WORDS_PER_PAGE / 8) * 8;
}

static inline void access_page(struct steady *s, uint8_t *memory, uint64_t page, enum access access)
{
    uint64_t *words = (uint64_t *)(memory + page * PCOW_PAGE_SIZE);

    switch (access) {
    case READ_PAGE:
        memcpy(s->buffer, words, PCOW_PAGE_SIZE);
        __asm__ volatile("" ::: "memory");
        s->wrong |= chain_word_page(s->buffer[0]) ^ page;
        break;
    case WRITE_PAGE:
        s->buffer[0] = chain_word(page, WRITE_PAGE);
        memcpy(words, s->buffer, PCOW_PAGE_SIZE);
        __asm__ volatile("" ::: "memory");
        break;
    case STORE_FLUSH: {
        uint64_t *line = line_of(words, page);

        s->buffer[0] = chain_word(page, STORE_FLUSH);
        memcpy(line, s->buffer, 64);
        s->bench->flush_lines(line, 64);
        _mm_sfence();
        break;
    }
    }
}

static double time_batch(struct steady *s, uint8_t *memory)
{
    uint64_t start = now_ns();

    /* One loop for each kind, so that the choice is not made inside. */
    switch (s->access) {
    case READ_PAGE:
        for (size_t i = 0; i < BATCH; i++) {
            access_page(s, memory, s->order[i], READ_PAGE);
        }
        break;
    case WRITE_PAGE:
        for (size_t i = 0; i < BATCH; i++) {
            access_page(s, memory, s->order[i], WRITE_PAGE);
        }
        break;
    case STORE_FLUSH:
        for (size_t i = 0; i < BATCH; i++) {
            access_page(s, memory, s->order[i], STORE_FLUSH);
        }
        break;
    }
    return ((double)(now_ns() - start) - s->bench->limits.clock_ns) / BATCH;
}

static double time_each(struct steady *s, uint8_t *memory)
{
    for (size_t i = 0; i < BATCH; i++) {
        uint64_t start = now_ns();

        access_page(s, memory, s->order[i], s->access);
        s->samples[i] = (double)(now_ns() - start) - s->bench->limits.clock_ns;
    }
    return percentile(s->samples, BATCH, 0.99);
}

static void choose_pages(struct steady *s, uint64_t *seed)
{
    for (size_t i = 0; i < BATCH; i++) {
        s->order[i] = random_next(seed) % s->pages;
        s->visited[s->order[i]] = 1;
    }
}

static void repeat(void *opaque, unsigned thread)
{
    struct steady *s = opaque;
    uint64_t seed = SEED;

    (void)thread;
    choose_pages(s, &seed);
    for (unsigned side = 0; side < 2; side++) {
        time_batch(s, s->memory[side]);        /* warm up */
    }
    for (unsigned repetition = 0; repetition < s->bench->repeat && !interrupt_pending(); repetition++) {
        double p99[2];

        for (unsigned batch = 0; batch < BATCHES; batch++) {
            choose_pages(s, &seed);
            /* Who comes second finds the order array, but not the pages, in the cache: so they change places. */
            for (unsigned turn = 0; turn < 2; turn++) {
                unsigned side = turn ^ (batch & 1);

                s->batches[side][batch] = time_batch(s, s->memory[side]);
            }
        }
        choose_pages(s, &seed);
        for (unsigned side = 0; side < 2; side++) {
            p99[side] = time_each(s, s->memory[side]);
        }
        for (unsigned side = 0; side < 2; side++) {
            series_add_value(&s->series[side], percentile(s->batches[side], BATCHES, 0.5), p99[side]);
        }
    }
}

/* Every store arrived, on both sides. */
static int verify_stores(const struct steady *s, const char *name, struct pcow_error *error)
{
    for (uint64_t page = 0; page < s->pages && s->access != READ_PAGE; page++) {
        for (unsigned side = 0; side < 2 && s->visited[page]; side++) {
            uint64_t *words = (uint64_t *)(s->memory[side] + page * PCOW_PAGE_SIZE);

            if (*(s->access == STORE_FLUSH ? line_of(words, page) : words) != chain_word(page, s->access)) {
                return fail(error, -EILSEQ, "%s: a store to offset %llu of %s was lost", name,
                            (unsigned long long)(page * PCOW_PAGE_SIZE), side ? "pcow" : "raw");
            }
        }
    }
    return 0;
}

static int add_row(const struct steady *s, const char *name, const struct chain_sides *sides, struct pcow_error *error)
{
    struct row *row = bench_add_row(s->bench, name, 1, engine_name(PCOW_ENGINE_SIGNAL));

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&s->series[0]);
    row->raw_p99_ns = series_p99(&s->series[0]);
    row->limit_ns = row->raw_ns;
    row->pcow_ns = series_value(&s->series[1]);
    row->pcow_p99_ns = series_p99(&s->series[1]);
    row_add_criterion(row, "pcow/raw", row->pcow_ns / row->raw_ns, AT_MOST);
    row_add_detail(row, "samples", (double)BATCHES * BATCH * s->bench->repeat);
    row_add_detail(row, "vmas", count_mappings(sides->pcow, s->bench->size));
    row_add_detail(row, "raw_huge_share", huge_share(sides->raw.memory, s->bench->size));
    row_add_detail(row, "pcow_huge_share", huge_share(sides->pcow, s->bench->size));
    return 0;
}

static int measure(struct bench *bench, const char *name, enum access access, struct chain_sides *sides, struct pcow_error *error)
{
    struct steady *s = calloc(1, sizeof(*s));
    int r = s ? 0 : -ENOMEM;

    if (s) {
        *s = (struct steady){.bench = bench, .access = access, .memory = {sides->raw.memory, sides->pcow},
                             .pages = bench->size / PCOW_PAGE_SIZE, .visited = calloc(bench->size / PCOW_PAGE_SIZE, 1), .order = calloc(BATCH, sizeof(uint64_t)),
                             .buffer = aligned_alloc(PCOW_PAGE_SIZE, PCOW_PAGE_SIZE), .samples = calloc(BATCH, sizeof(double)),
                             .batches = {calloc(BATCHES, sizeof(double)), calloc(BATCHES, sizeof(double))}};
        r = s->visited && s->order && s->buffer && s->samples && s->batches[0] && s->batches[1] ? 0 : -ENOMEM;
    }
    if (r) {
        fail(error, r, "out of memory");
    } else {
        memset(s->buffer, 0, PCOW_PAGE_SIZE);
        r = run_threads(1, repeat, s, error);
        r = r ? r : bench_need(bench, 0, error);
    }
    if (!r && s->wrong) {
        r = fail(error, -EILSEQ, "%s read wrong data; its times mean nothing", name);
    }
    r = r ? r : verify_stores(s, name, error);
    r = r ? r : add_row(s, name, sides, error);
    if (s) {
        free(s->visited);
        free(s->order);
        free(s->buffer);
        free(s->samples);
        free(s->batches[0]);
        free(s->batches[1]);
    }
    free(s);
    return r;
}

static int run_reads(struct bench *bench, const char *name, uint64_t unit, struct pcow_error *error)
{
    struct chain_sides sides;
    int r = bench_need(bench, 3 * bench->size + SLACK, error);

    r = r ? r : chain_open(bench, unit, &sides, error);
    if (r) {
        return r;
    }
    r = measure(bench, name, READ_PAGE, &sides, error);
    r = r ? r : chain_verify(&sides, error);
    chain_close(&sides);
    return r;
}

static int run_writes(struct bench *bench, struct pcow_error *error)
{
    struct chain_sides sides;
    int r = bench_need(bench, 4 * bench->size + SLACK, error);

    r = r ? r : chain_open(bench, PCOW_SLAB_SIZE, &sides, error);
    if (r) {
        return r;
    }
    chain_write_all(&sides);
    if (bench_wants(bench, "steady-write-4k")) {
        r = measure(bench, "steady-write-4k", WRITE_PAGE, &sides, error);
    }
    if (!r && bench_wants(bench, "steady-store-flush")) {
        r = measure(bench, "steady-store-flush", STORE_FLUSH, &sides, error);
    }
    r = r ? r : chain_verify(&sides, error);
    chain_close(&sides);
    return r;
}

static const char *const names[] = {"steady-read-4k", "steady-read-4k-scattered", "steady-write-4k", "steady-store-flush", NULL};

static int run(struct bench *bench, struct pcow_error *error)
{
    int r = 0;

    if (bench_wants(bench, "steady-read-4k")) {
        r = run_reads(bench, "steady-read-4k", PCOW_SLAB_SIZE, error);
    }
    if (!r && bench_wants(bench, "steady-read-4k-scattered")) {
        r = run_reads(bench, "steady-read-4k-scattered", PCOW_DEFAULT_CLUSTER_SIZE, error);
    }
    if (!r && (bench_wants(bench, "steady-write-4k") || bench_wants(bench, "steady-store-flush"))) {
        r = run_writes(bench, error);
    }
    return r;
}

const struct group steady_group = {names, run};
