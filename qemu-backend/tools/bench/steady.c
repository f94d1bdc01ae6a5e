/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Steady state: random accesses to a chain on which every page has been written, against the raw
 * mapping of a file with the same content. The sides take turns batch by batch; a batch is timed as
 * a whole, p99 comes from accesses timed one by one. Where the pages of a file lie in physical
 * memory, and how the host backs it, moves the result by several per cent: the files are made anew
 * for every repetition, and a second raw file is measured as a control.
 */
#include <errno.h>
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "chain.h"
#include "huge.h"
#include "report.h"
#include "sample.h"
#include "threads.h"

#define BATCH 2048u
#define BATCHES 32u                            /* for each repetition and side */
/* of raw's speed, and of as many huge mappings */
#define AT_LEAST 0.98
#define SLACK (UINT64_C(256) << 20)
#define SEED UINT64_C(0x73746561)
#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))

enum { RAW, CONTROL, PAPER, PCOW, SIDES };

/* The value is also what a store leaves behind: see chain_word(). */
enum access { READ_PAGE = CHAIN_FREE, WRITE_PAGE, STORE_FLUSH };

struct steady {
    struct bench *bench;
    const char *name;
    enum access access;
    uint8_t *memory[SIDES];
    uint64_t pages, seed;
    uint64_t *order;                           /* BATCH pages */
    uint64_t *buffer;
    uint64_t wrong;                            /* page numbers that did not fit to the page */
    uint8_t *visited;                          /* by page, in this repetition */
    double *samples;                           /* BATCH */
    double batches[SIDES][BATCHES];
    struct series series[SIDES];
    unsigned vmas;                             /* of the last repetition */
    double raw_huge, pcow_huge;                /* mappings of 2 MiB, of the last repetition */
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

static void choose_pages(struct steady *s)
{
    for (size_t i = 0; i < BATCH; i++) {
        s->order[i] = random_next(&s->seed) % s->pages;
        s->visited[s->order[i]] = 1;
    }
}

static void repetition(void *opaque, unsigned thread)
{
    struct steady *s = opaque;
    double p99[SIDES];

    (void)thread;
    choose_pages(s);
    for (unsigned side = 0; side < SIDES; side++) {
        time_batch(s, s->memory[side]);        /* warm up */
    }
    for (unsigned batch = 0; batch < BATCHES; batch++) {
        choose_pages(s);
        /*
         * Who comes first finds the order array, and not the pages, in the cache: so they change
         * places.
         */
        for (unsigned turn = 0; turn < SIDES; turn++) {
            unsigned side = (turn + batch) % SIDES;

            s->batches[side][batch] = time_batch(s, s->memory[side]);
        }
    }
    choose_pages(s);
    for (unsigned side = 0; side < SIDES; side++) {
        p99[side] = time_each(s, s->memory[side]);
        series_add_value(&s->series[side], percentile(s->batches[side], BATCHES, 0.5), p99[side]);
    }
}

/* Every store arrived, on all sides. */
static int verify_stores(const struct steady *s, struct pcow_error *error)
{
    for (uint64_t page = 0; page < s->pages && s->access != READ_PAGE; page++) {
        for (unsigned side = 0; side < SIDES && s->visited[page]; side++) {
            uint64_t *words = (uint64_t *)(s->memory[side] + page * PCOW_PAGE_SIZE);

            if (*(s->access == STORE_FLUSH ? line_of(words, page) : words)
                != chain_word(page, s->access)) {
                return fail(error, -EILSEQ, "%s: a store to offset %llu of %s was lost", s->name,
                            (unsigned long long)(page * PCOW_PAGE_SIZE),
                            side == PCOW ? "pcow" : "raw");
            }
        }
    }
    return 0;
}

static void steady_end(struct steady *s)
{
    if (s) {
        free(s->visited);
        free(s->order);
        free(s->buffer);
        free(s->samples);
    }
    free(s);
}

/* NULL when out of memory. */
static struct steady *steady_begin(struct bench *bench, const char *name, enum access access)
{
    struct steady *s = calloc(1, sizeof(*s));

    if (!s) {
        return NULL;
    }
    s->bench = bench;
    s->name = name;
    s->access = access;
    s->pages = bench->size / PCOW_PAGE_SIZE;
    s->seed = SEED;
    s->order = calloc(BATCH, sizeof(*s->order));
    s->buffer = aligned_alloc(PCOW_PAGE_SIZE, PCOW_PAGE_SIZE);
    s->visited = calloc(s->pages, 1);
    s->samples = calloc(BATCH, sizeof(*s->samples));
    if (!s->order || !s->buffer || !s->visited || !s->samples) {
        steady_end(s);
        return NULL;
    }
    return s;
}

/* Of 2 MiB each. */
static double huge_mappings(const void *memory, uint64_t size)
{
    return round(huge_share(memory, size) * (double)size / PCOW_SLAB_SIZE);
}

static int measure_once(struct steady *s, const struct chain_sides *sides, struct pcow_error *error)
{
    int r;

    s->memory[RAW] = sides->raw[CHAIN_PLAIN].memory;
    s->memory[CONTROL] = sides->raw[CHAIN_CONTROL].memory;
    s->memory[PAPER] = sides->raw[CHAIN_PAPER].memory;
    s->memory[PCOW] = sides->pcow;
    memset(s->visited, 0, s->pages);
    memset(s->buffer, 0, PCOW_PAGE_SIZE);
    r = run_threads(1, repetition, s, error);
    if (!r && s->wrong) {
        r = fail(error, -EILSEQ, "%s read wrong data; its times mean nothing", s->name);
    }
    s->vmas = count_mappings(sides->pcow, s->bench->size);
    s->raw_huge = huge_mappings(sides->raw[CHAIN_PLAIN].memory, s->bench->size);
    s->pcow_huge = huge_mappings(sides->pcow, s->bench->size);
    return r ? r : verify_stores(s, error);
}

static int add_row(const struct steady *s, struct pcow_error *error)
{
    struct row *row = bench_add_row(s->bench, s->name, 1, engine_name(PCOW_ENGINE_SIGNAL));

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&s->series[RAW]);
    row->raw_p99_ns = series_p99(&s->series[RAW]);
    row->limit_ns = row->raw_ns;
    row->paper_ns = series_value(&s->series[PAPER]);
    row->pcow_ns = series_value(&s->series[PCOW]);
    row->pcow_p99_ns = series_p99(&s->series[PCOW]);
    row_add_criterion_at_least(row, "raw/pcow", row->raw_ns / row->pcow_ns, AT_LEAST);
    if (s->raw_huge > 0) {
        row_add_criterion_at_least(row, "2 MiB mappings", s->pcow_huge,
                                   floor(AT_LEAST * s->raw_huge));
    }
    row_add_detail(row, "control_ratio", series_value(&s->series[CONTROL]) / row->raw_ns);
    row_add_detail(row, "samples", (double)BATCHES * BATCH * s->bench->repeat);
    row_add_detail(row, "vmas", s->vmas);
    row_add_detail(row, "raw_huge_mappings", s->raw_huge);
    row_add_detail(row, "pcow_huge_mappings", s->pcow_huge);
    return 0;
}

struct plan {
    const char *name;
    enum access access;
};

/* What the image has gone through before it is measured. */
enum past {
    LAYERED,                                   /* pages lie in all layers */
    /* every page was stored to since the last snapshot */
    STORED,
    COPIED,                                    /* every page was read with copy-on-read on */
};

struct step {
    struct plan plan[2];                       /* rows that share a chain */
    uint64_t unit;
    enum past past;
    bool huge;                                 /* with files that are mapped with huge pages */
};

static int run_plan(struct bench *bench, const struct step *step, struct pcow_error *error)
{
    struct steady *steady[2] = {NULL, NULL};
    int r = 0;

    for (unsigned i = 0; i < 2 && step->plan[i].name && !r; i++) {
        if (bench_wants(bench, step->plan[i].name)) {
            steady[i] = steady_begin(bench, step->plan[i].name, step->plan[i].access);
            r = steady[i] ? 0 : fail(error, -ENOMEM, "out of memory");
        }
    }
    for (unsigned i = 0; i < bench->repeat && !r && (steady[0] || steady[1]); i++) {
        struct chain_sides sides;

        r = bench_need(bench, (step->past == COPIED ? 7 : 6) * bench->size + SLACK, error);
        r = r ? r : chain_open(bench, step->unit, i & 1, step->past == COPIED, &sides, error);
        if (r) {
            break;
        }
        if (step->past == STORED) {
            chain_write_all(&sides);
        }
        r = steady[0] ? measure_once(steady[0], &sides, error) : 0;
        r = r || !steady[1] ? r : measure_once(steady[1], &sides, error);
        r = r ? r : chain_verify(&sides, error);
        chain_close(&sides);
    }
    for (unsigned i = 0; i < 2; i++) {
        r = r || !steady[i] ? r : add_row(steady[i], error);
        steady_end(steady[i]);
    }
    return r;
}

static const char *const names[] = {"steady-read-4k",
                                    "steady-read-4k-scattered",
                                    "steady-read-4k-copied",
                                    "steady-write-4k",
                                    "steady-store-flush",
                                    "steady-read-4k-huge",
                                    "steady-read-4k-scattered-huge",
                                    "steady-read-4k-copied-huge",
                                    "steady-write-4k-huge",
                                    "steady-store-flush-huge",
                                    NULL};

static const struct step steps[] = {
    {{{"steady-read-4k", READ_PAGE}}, PCOW_SLAB_SIZE, LAYERED, false},
    {{{"steady-read-4k-scattered", READ_PAGE}}, PCOW_DEFAULT_CLUSTER_SIZE, LAYERED, false},
    {{{"steady-read-4k-copied", READ_PAGE}}, PCOW_DEFAULT_CLUSTER_SIZE, COPIED, false},
    {{{"steady-write-4k", WRITE_PAGE}, {"steady-store-flush", STORE_FLUSH}},
     PCOW_SLAB_SIZE,
     STORED,
     false},
    {{{"steady-read-4k-huge", READ_PAGE}}, PCOW_SLAB_SIZE, LAYERED, true},
    {{{"steady-read-4k-scattered-huge", READ_PAGE}}, PCOW_DEFAULT_CLUSTER_SIZE, LAYERED, true},
    {{{"steady-read-4k-copied-huge", READ_PAGE}}, PCOW_DEFAULT_CLUSTER_SIZE, COPIED, true},
    {{{"steady-write-4k-huge", WRITE_PAGE}, {"steady-store-flush-huge", STORE_FLUSH}},
     PCOW_SLAB_SIZE,
     STORED,
     true},
};

static int run_step(struct bench *bench, const struct step *step, struct pcow_error *error)
{
    bool wanted = bench_wants(bench, step->plan[0].name)
                  || (step->plan[1].name && bench_wants(bench, step->plan[1].name));
    int r;

    if (!wanted || (step->huge && !huge_pool_enter(bench))) {
        return 0;
    }
    r = run_plan(bench, step, error);
    if (step->huge) {
        huge_pool_leave(bench);
    }
    return r;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    int r = 0;

    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]) && !r; i++) {
        r = run_step(bench, &steps[i], error);
    }
    return r;
}

const struct group steady_group = {names, run};
