/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A live snapshot and a revert of a mapped image whose every page was stored to before. There is no
 * such operation on raw memory; what stands in its column is the part that the kernel must do:
 * write protection of the same pages on one linear mapping, and mapping the file anew.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "paper.h"
#include "report.h"
#include "sample.h"
#include "sides.h"

#define CREATE "snapshot-create"
#define REVERT "snapshot-revert"
#define AT_MOST_PER_PAGE 30                    /* ns, freeze of 4 KiB entries */
#define ROUNDS 2u                              /* snapshots for each repetition */
#define RAW_SNAPSHOT_FILE "raw-snapshot"
#define SLACK (UINT64_C(256) << 20)

enum operation { DO_CREATE, DO_REVERT, OPERATIONS };

struct snapshot_row {
    struct bench *bench;
    uint64_t size;
    double time[OPERATIONS][ROUNDS];           /* of the side in progress */
    struct series raw[OPERATIONS], paper[OPERATIONS], pcow[OPERATIONS];
};

static uint64_t content(uint64_t page, uint64_t generation)
{
    return page_pattern(page) + generation;
}

static void store_all(uint8_t *memory, uint64_t size, uint64_t generation)
{
    for (uint64_t offset = 0; offset < size; offset += PCOW_PAGE_SIZE) {
        *(volatile uint64_t *)(memory + offset) = content(offset / PCOW_PAGE_SIZE, generation);
    }
}

static int verify_all(const uint8_t *memory, uint64_t size, uint64_t generation, const char *what,
                      struct pcow_error *error)
{
    for (uint64_t offset = 0; offset < size; offset += PCOW_PAGE_SIZE) {
        if (*(const uint64_t *)(memory + offset) != content(offset / PCOW_PAGE_SIZE, generation)) {
            return fail(error, -EILSEQ,
                        "%s holds wrong data at offset %llu; its times mean nothing", what,
                        (unsigned long long)offset);
        }
    }
    return 0;
}

static void finish(struct snapshot_row *s, struct series series[OPERATIONS])
{
    for (unsigned operation = 0; operation < OPERATIONS; operation++) {
        for (unsigned round = 0; round < ROUNDS; round++) {
            s->time[operation][round] -= s->bench->limits.clock_ns;
        }
        series_add(&series[operation], s->time[operation], ROUNDS, 0);
    }
}

static int measure_raw(struct snapshot_row *s, struct pcow_error *error)
{
    for (unsigned round = 0; round < ROUNDS; round++) {
        struct raw raw;
        uint64_t start;
        int r = raw_map(s->bench, RAW_SNAPSHOT_FILE, &raw, error);

        if (r) {
            return r;
        }
        store_all(raw.memory, s->size, round);
        start = now_ns();
        r = mprotect(raw.memory, s->size, PROT_READ);
        s->time[DO_CREATE][round] = (double)(now_ns() - start);
        start = now_ns();
        if (r
            || mmap(raw.memory, s->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, raw.fd, 0)
                   == MAP_FAILED) {
            r = fail(error, -errno, "cannot protect and map raw memory: %s", strerror(errno));
        }
        s->time[DO_REVERT][round] = (double)(now_ns() - start);
        r = r ? r : verify_all(raw.memory, s->size, round, "raw", error);
        raw_unmap(&raw);
        if (r) {
            return r;
        }
    }
    finish(s, s->raw);
    return 0;
}

static int measure_paper_round(struct snapshot_row *s, struct paper *paper, unsigned round,
                               struct pcow_error *error)
{
    uint8_t *memory = paper_memory(paper);
    uint64_t start;
    int r;

    store_all(memory, s->size, 2 * round);
    start = now_ns();
    r = paper_snapshot(paper, error);
    s->time[DO_CREATE][round] = (double)(now_ns() - start);
    if (r) {
        return r;
    }
    store_all(memory, s->size, 2 * round + 1);
    r = paper_check(paper, error);
    r = r ? r : verify_all(memory, s->size, 2 * round + 1, "the paper's method", error);
    start = now_ns();
    r = r ? r : paper_revert(paper, error);
    s->time[DO_REVERT][round] = (double)(now_ns() - start);
    return r ? r : verify_all(memory, s->size, 2 * round, "the paper's method, reverted,", error);
}

static int measure_paper(struct snapshot_row *s, struct pcow_error *error)
{
    struct paper_options options = {.size = s->size, .cluster_size = PCOW_DEFAULT_CLUSTER_SIZE};
    struct paper *paper;
    int r = paper_open(s->bench, &options, &paper, error);

    for (unsigned round = 0; round < ROUNDS && !r; round++) {
        r = measure_paper_round(s, paper, round, error);
    }
    paper_close(paper);
    if (!r) {
        finish(s, s->paper);
    }
    return r;
}

static int measure_pcow_round(struct snapshot_row *s, struct side *side, unsigned round,
                              struct pcow_error *error)
{
    char name[16];
    uint64_t start;
    int r;

    snprintf(name, sizeof(name), "s%u", round);
    store_all(side->memory, s->size, 2 * round);
    start = now_ns();
    r = pcow_snapshot_create(side->image, name, error);
    s->time[DO_CREATE][round] = (double)(now_ns() - start);
    if (r) {
        return r;
    }
    store_all(side->memory, s->size, 2 * round + 1);
    r = verify_all(side->memory, s->size, 2 * round + 1, "pcow", error);
    start = now_ns();
    r = r ? r : pcow_snapshot_revert(side->image, name, error);
    s->time[DO_REVERT][round] = (double)(now_ns() - start);
    return r ? r : verify_all(side->memory, s->size, 2 * round, "pcow, reverted,", error);
}

static int measure_pcow(struct snapshot_row *s, struct pcow_error *error)
{
    struct side side;
    int r = side_open(s->bench, &side, NULL, s->size, 0, PCOW_ENGINE_SIGNAL, error);

    if (r) {
        return r;
    }
    for (unsigned round = 0; round < ROUNDS && !r; round++) {
        r = measure_pcow_round(s, &side, round, error);
    }
    side_close(s->bench, &side);
    if (!r) {
        finish(s, s->pcow);
    }
    return r;
}

static int measure_once(struct snapshot_row *s, struct pcow_error *error)
{
    int r = bench_need(s->bench, (2 + ROUNDS) * s->size + SLACK, error);

    r = r ? r : measure_raw(s, error);
    r = r ? r : measure_pcow(s, error);
    return r || s->bench->paper_problem ? r : measure_paper(s, error);
}

static int add_row(const struct snapshot_row *s, enum operation operation, struct pcow_error *error)
{
    double pages = (double)(s->size / PCOW_PAGE_SIZE);
    struct row *row = bench_add_row(s->bench, operation == DO_CREATE ? CREATE : REVERT, 1,
                                    engine_name(PCOW_ENGINE_SIGNAL));

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&s->raw[operation]);
    row->raw_p99_ns = series_p99(&s->raw[operation]);
    row->limit_ns = row->raw_ns;
    row->paper_ns = series_value(&s->paper[operation]);
    row->pcow_ns = series_value(&s->pcow[operation]);
    row->pcow_p99_ns = series_p99(&s->pcow[operation]);
    if (operation == DO_CREATE) {
        row_add_criterion(row, "ns/page", row->pcow_ns / pages, AT_MOST_PER_PAGE);
    }
    row_add_detail(row, "samples", (double)ROUNDS * s->bench->repeat);
    row_add_detail(row, "populated_pages", pages);
    return 0;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    const char *const row_names[OPERATIONS] = {CREATE, REVERT};
    struct snapshot_row *s;
    int r;

    if (!bench_wants(bench, CREATE) && !bench_wants(bench, REVERT)) {
        return 0;
    }
    s = calloc(1, sizeof(*s));
    if (!s) {
        return fail(error, -ENOMEM, "out of memory");
    }
    s->bench = bench;
    s->size = bench->size / 2 / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE;
    r = raw_create(bench, RAW_SNAPSHOT_FILE, s->size, error);
    for (unsigned repetition = 0; repetition < bench->repeat && !r; repetition++) {
        r = measure_once(s, error);
    }
    for (unsigned operation = 0; operation < OPERATIONS; operation++) {
        if (!r && bench_wants(bench, row_names[operation])) {
            r = add_row(s, operation, error);
        }
    }
    bench_remove(bench, RAW_SNAPSHOT_FILE);
    free(s);
    return r;
}

static const char *const names[] = {CREATE, REVERT, NULL};

const struct group snapshot_group = {names, run};
