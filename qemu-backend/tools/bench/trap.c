/* SPDX-License-Identifier: BSD-3-Clause */
#include "trap.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "bare.h"
#include "copies.h"
#include "paper.h"
#include "report.h"
#include "sample.h"
#include "stores.h"

/* tables, and the step by which an image file grows */
#define SLACK (UINT64_C(128) << 20)
#define SEED UINT64_C(0x70636f77)
#define MOST_PREPARED 256u
#define ENGINES 2u

/* All sides of one row at one number of threads. */
struct measurement {
    struct bench *bench;
    const struct trap_row *row;
    struct stores stores;
    struct copies copies;
    struct series raw, copy, bare, paper, paper_preallocated, pcow[ENGINES],
        pcow_unprepared[ENGINES];
    double traps[ENGINES], copied[ENGINES];                /* in the last repetition */
};

static const enum pcow_engine engines[ENGINES] = {PCOW_ENGINE_SIGNAL, PCOW_ENGINE_MINOR};

static bool engine_usable(const struct measurement *m, enum pcow_engine engine)
{
    return engine == PCOW_ENGINE_SIGNAL || !m->bench->minor_problem;
}

static void add_samples(struct measurement *m, struct series *series)
{
    series_add(series, m->stores.samples, m->stores.visits.count, m->row->amortised);
}

static int measure_raw(struct measurement *m, bool every_page, struct pcow_error *error)
{
    struct raw raw;
    int r = raw_map(m->bench, RAW_FILE, &raw, error);

    if (r) {
        return r;
    }
    stores_warm(&m->stores, raw.memory);
    r = stores_run(&m->stores, raw.memory, error);
    r = r ? r : stores_verify(&m->stores, "raw", raw.memory, true, every_page, error);
    if (!r) {
        add_samples(m, &m->raw);
        raw_restore(&raw);
    }
    raw_unmap(&raw);
    return r;
}

static int measure_paper(struct measurement *m, bool preallocated, bool every_page,
                         struct pcow_error *error)
{
    struct paper_options options = {
        .size = m->bench->size,
        .cluster_size = m->row->paper_cluster_size,
        .fine_grained = m->row->paper_fine_grained,
        .base = m->row->on_base ? RAW_FILE : NULL,
        .preallocated = preallocated,
    };
    struct paper *paper;
    int r = paper_open(m->bench, &options, &paper, error);

    if (r) {
        return r;
    }
    /*
     * Its clusters are copied whole at once: a store to a slab before would leave nothing to time.
     */
    if (!m->stores.visits.warm_stores) {
        stores_warm(&m->stores, paper_memory(paper));
    }
    r = stores_run(&m->stores, paper_memory(paper), error);
    if (m->stores.visits.warm_stores) {
        stores_warm(&m->stores, paper_memory(paper));
    }
    r = r ? r : paper_check(paper, error);
    r = r ? r
          : stores_verify(&m->stores, "the paper's method", paper_memory(paper), m->row->on_base,
                          every_page, error);
    if (!r) {
        add_samples(m, preallocated ? &m->paper_preallocated : &m->paper);
    }
    paper_close(paper);
    return r;
}

/*
 * The slabs that a row takes are prepared, as far as a map keeps so many: the pre-allocation is
 * ahead of the stores, or it is not.
 */
static unsigned slabs_of(const struct measurement *m)
{
    uint64_t slabs = m->bench->size / PCOW_SLAB_SIZE;

    return slabs < MOST_PREPARED ? (unsigned)slabs : MOST_PREPARED;
}

static int measure_pcow(struct measurement *m, unsigned engine, bool prepared, bool every_page,
                        struct pcow_error *error)
{
    size_t count = m->stores.visits.count;
    struct pcow_map_stats before, after;
    struct side side;
    uint64_t traps;
    int r = side_open_prepared(m->bench, &side, m->row->on_base ? BASE_IMAGE : NULL, m->bench->size,
                               m->row->cluster_size, engines[engine], prepared ? slabs_of(m) : 0,
                               error);

    if (r) {
        return r;
    }
    stores_warm(&m->stores, side.memory);
    if (prepared) {
        side_settle(&side, slabs_of(m));
    }
    pcow_map_get_stats(side.map, &before);
    r = stores_run(&m->stores, side.memory, error);
    pcow_map_get_stats(side.map, &after);
    traps = after.write_traps + after.read_traps - before.write_traps - before.read_traps;
    m->traps[engine] = (double)traps / (double)count;
    m->copied[engine] = (double)(after.pages_copied - before.pages_copied) / (double)count;
    /*
     * A few may not: two neighbours that happen to be stored to in order look like a sequence, and
     * more than one cluster is brought in.
     */
    if (!r && !m->row->amortised && traps < count - count / 10) {
        r = fail(error, -EPROTO,
                 "%s: only %llu of %zu stores trapped; this row would not measure what it says",
                 m->row->name, (unsigned long long)traps, count);
    }
    r = r ? r : stores_verify(&m->stores, "pcow", side.memory, m->row->on_base, every_page, error);
    if (!r) {
        add_samples(m, prepared ? &m->pcow[engine] : &m->pcow_unprepared[engine]);
    }
    side_close(m->bench, &side);
    return r;
}

/* The sides take turns, so that what else the machine does hits all of them alike. */
static int measure_once(struct measurement *m, bool every_page, struct pcow_error *error)
{
    int r = bench_need(m->bench, m->bench->size + SLACK, error);

    r = r ? r : measure_raw(m, every_page, error);
    if (!r && m->row->copied) {
        double ns = copies_time(&m->copies, m->bench, m->row->copied);

        series_add_value(&m->copy, ns, ns);
    }
    if (!r && m->row->bare) {
        r = bare_run(&m->stores, m->bench, m->row, &m->copies, error);
        if (!r) {
            add_samples(m, &m->bare);
        }
    }
    for (unsigned engine = 0; engine < ENGINES && !r; engine++) {
        if (engine_usable(m, engines[engine])) {
            r = measure_pcow(m, engine, true, every_page, error);
            r = r ? r : measure_pcow(m, engine, false, every_page, error);
        }
    }
    if (!r && (m->row->on_base || !m->bench->paper_problem)) {
        r = measure_paper(m, false, every_page, error);
        r = r ? r : measure_paper(m, true, every_page, error);
    }
    return r;
}

static int add_rows(struct measurement *m, struct pcow_error *error)
{
    unsigned threads = m->stores.threads;
    double copy_ns = m->row->copied ? series_value(&m->copy) : 0;

    if (m->row->visit == VISIT_SECOND_IN_CLUSTER) {
        /* one page is there */
        copy_ns -= copy_ns * (double)PCOW_PAGE_SIZE / (double)m->row->copied;
    }
    for (unsigned engine = 0; engine < ENGINES; engine++) {
        struct row *row;

        if (!engine_usable(m, engines[engine])) {
            continue;
        }
        row = bench_add_row(m->bench, m->row->name, threads, engine_name(engines[engine]));
        if (!row) {
            return fail(error, -ENOMEM, "out of memory");
        }
        row->raw_ns = series_value(&m->raw);
        row->raw_p99_ns = series_p99(&m->raw);
        row->raw_p999_ns = series_p999(&m->raw);
        row->limit_ns = row->raw_ns + copy_ns;
        /*
         * Like with like: allocation is ahead of the stores on both sides; the details have both
         * without it.
         */
        row->paper_ns = series_value(&m->paper_preallocated);
        row->pcow_ns = series_value(&m->pcow[engine]);
        row->pcow_p99_ns = series_p99(&m->pcow[engine]);
        row->pcow_p999_ns = series_p999(&m->pcow[engine]);
        if (m->row->at_most_raw[threads - 1] > 0) {
            row_add_criterion(row, "pcow/raw", row->pcow_ns / row->raw_ns,
                              m->row->at_most_raw[threads - 1]);
        }
        if (m->row->at_most_limit > 0) {
            row_add_criterion(row, "pcow/limit", row->pcow_ns / row->limit_ns,
                              m->row->at_most_limit);
        }
        if (m->row->at_most_p99_us > 0) {
            row_add_criterion(row, "p99, us", row->pcow_p99_ns / 1000, m->row->at_most_p99_us);
        }
        if (m->paper.count) {
            row_add_detail(row, "paper_p99_ns", series_p99(&m->paper_preallocated));
            row_add_detail(row, "paper_unprepared_ns", series_value(&m->paper));
        }
        row_add_detail(row, "unprepared_ns", series_value(&m->pcow_unprepared[engine]));
        if (m->row->bare) {
            row_add_detail(row, "bare_trap_ns", series_value(&m->bare));
            row_add_detail(row, "bare_trap_p99_ns", series_p99(&m->bare));
        }
        row_add_detail(row, "samples", (double)m->stores.visits.count * m->bench->repeat);
        row_add_detail(row, "traps_per_store", m->traps[engine]);
        row_add_detail(row, "pages_copied_per_store", m->copied[engine]);
    }
    return 0;
}

static int measure_threads(struct bench *bench, const struct trap_row *row, unsigned threads,
                           struct pcow_error *error)
{
    struct measurement *m = calloc(1, sizeof(*m));
    int r = m ? 0 : fail(error, -ENOMEM, "out of memory");

    if (m) {
        m->bench = bench;
        m->row = row;
        m->copies.source.fd = m->copies.target.fd = -1;
        r = stores_begin(&m->stores, bench, row->visit, row->cluster_size, threads, SEED, error);
    }
    if (!r && (row->copied || row->bare)) {
        r = copies_begin(&m->copies, bench, error);
    }
    for (unsigned repetition = 0; repetition < bench->repeat && !r; repetition++) {
        /* Every byte once; later only what was stored to, and its surroundings. */
        r = measure_once(m, repetition == 0, error);
    }
    r = r ? r : add_rows(m, error);
    if (m) {
        stores_end(&m->stores);
        if (row->copied || row->bare) {
            copies_end(&m->copies, bench);
        }
    }
    free(m);
    return r;
}

int measure_trap_row(struct bench *bench, const struct trap_row *row, struct pcow_error *error)
{
    int r = ensure_content(bench, row->on_base, error);

    for (unsigned threads = 1; threads <= MAX_THREADS && !r; threads++) {
        r = measure_threads(bench, row, threads, error);
    }
    return r || !row->on_base ? r : verify_base(bench, row->name, error);
}
