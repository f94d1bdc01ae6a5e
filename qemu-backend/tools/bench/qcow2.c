/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Beside qcow2: 4 KiB written to every 64 KiB of an image on a base (copy-on-write) and of an empty
 * one (expansion).
 *
 * qcow2's side is QEMU's block layer alone, driven by qemu-img bench from inside its process: no
 * guest, no virtio, no exit from a vCPU, all of which pcow's side, a store, does not need and qcow2
 * in a VM cannot do without. Its settings are the best of a list, found anew in each run; those
 * that it is used with, defaults, are measured as well.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "paper.h"
#include "report.h"
#include "sample.h"
#include "sides.h"
#include "stores.h"
#include "threads.h"

#define STEP PCOW_DEFAULT_CLUSTER_SIZE
#define BASE "qcow2-base"
#define TOP "qcow2-top"
#define SLACK (UINT64_C(256) << 20)
#define AT_LEAST 10                            /* times better than qcow2 */
/* requests in flight, for IOPS; the paper used as many threads */
#define DEEP 16
#define COMMAND_LENGTH 16384

struct setting {
    const char *name, *create, *drive, *cache;
};

/* The first is what one gets without asking for anything. */
static const struct setting settings[] = {
    {"defaults", "cluster_size=64k", "file.aio=threads", "writeback"},
    {"io_uring", "cluster_size=64k", "file.aio=io_uring,l2-cache-size=64M", "unsafe"},
    {"direct, native AIO", "cluster_size=64k", "file.aio=native,cache.direct=on,l2-cache-size=64M",
     "none"},
    {"subclusters, io_uring", "cluster_size=128k,extended_l2=on",
     "file.aio=io_uring,l2-cache-size=64M", "unsafe"},
    {"subclusters, direct, native AIO", "cluster_size=128k,extended_l2=on",
     "file.aio=native,cache.direct=on,l2-cache-size=64M", "none"},
    {"clusters of 4 KiB, io_uring", "cluster_size=4k", "file.aio=io_uring,l2-cache-size=64M",
     "unsafe"},
};

#define SETTINGS (sizeof(settings) / sizeof(settings[0]))

enum operation { COW_LATENCY, COW_IOPS, EXPANSION_LATENCY, OPERATIONS };

static const char *const names[] = {"qcow2-cow-latency", "qcow2-cow-iops",
                                    "qcow2-expansion-latency", NULL};

struct comparison {
    struct bench *bench;
    struct series raw[OPERATIONS], paper[OPERATIONS], pcow[OPERATIONS], unprepared[OPERATIONS];
    struct series qcow2[OPERATIONS][SETTINGS];
};

/* One of the pcow side's threads. */
struct writer {
    uint8_t *memory;
    uint64_t size;
    unsigned threads;
    const uint64_t *source;                    /* a page */
};

/*
 * Run a shell command and give the last line that it prints.  Paths in it are the benchmark's own.
 */
static int run_command(char *command, char line[256], struct pcow_error *error)
{
    FILE *pipe = popen(command, "re");
    int status;

    line[0] = '\0';
    while (pipe && fgets(line, 256, pipe)) {
    }
    status = pipe ? pclose(pipe) : -1;
    line[strcspn(line, "\n")] = '\0';
    return status == 0 ? 0 : fail(error, -EIO, "qemu-img failed: %s", line);
}

static int qcow2_create(const struct comparison *c, const struct setting *setting, bool on_base,
                        struct pcow_error *error)
{
    char command[COMMAND_LENGTH], line[256], base[8192] = "";

    if (on_base) {
        snprintf(base, sizeof(base), "-b '%s/" BASE "' -F qcow2", c->bench->directory);
    }
    snprintf(command, sizeof(command),
             "qemu-img create -q -f qcow2 -o %s %s '%s/" TOP "' %llu 2>&1 </dev/null",
             setting->create, base, c->bench->directory, (unsigned long long)c->bench->size);
    return run_command(command, line, error);
}

/*
 * Nanoseconds for one of the writes; NAN if this qemu-img or this file system cannot do it that
 * way.
 */
static double bench_drive(const struct comparison *c, const char *drive, const char *cache,
                          unsigned depth)
{
    char command[COMMAND_LENGTH], line[256];
    struct pcow_error ignored;
    unsigned long long count = c->bench->size / STEP;
    double seconds;

    snprintf(
        command, sizeof(command),
        "qemu-img bench -w -c %llu -d %u -s %u -S %u -t %s --image-opts '%s,file.filename=%s/" TOP
        "' 2>&1 </dev/null",
        count, depth, (unsigned)PCOW_PAGE_SIZE, (unsigned)STEP, cache, drive, c->bench->directory);
    if (run_command(command, line, &ignored)
        || sscanf(line, "Run completed in %lf seconds", &seconds) != 1) {
        return NAN;
    }
    return seconds * 1e9 / (double)count;
}

static int measure_qcow2(struct comparison *c, enum operation operation, unsigned which,
                         struct pcow_error *error)
{
    const struct setting *setting = &settings[which];
    char drive[1024];
    double ns;
    int r = bench_need(c->bench, c->bench->size + SLACK, error);

    r = r ? r : qcow2_create(c, setting, operation != EXPANSION_LATENCY, error);
    if (!r) {
        snprintf(drive, sizeof(drive), "driver=qcow2,file.driver=file,%s", setting->drive);
        ns = bench_drive(c, drive, setting->cache, operation == COW_IOPS ? DEEP : 1);
        if (!isnan(ns)) {
            series_add_value(&c->qcow2[operation][which], ns, ns);
        }
    }
    bench_remove(c->bench, TOP);
    return r;
}

/* The same writes to a raw file that was written before, through the same block layer. */
static int measure_raw(struct comparison *c, enum operation operation, struct pcow_error *error)
{
    int r = bench_need(c->bench, c->bench->size + SLACK, error);
    double ns;

    r = r ? r : raw_create(c->bench, TOP, c->bench->size, error);
    if (!r) {
        ns = bench_drive(c, "driver=raw,file.driver=file,file.aio=io_uring", "unsafe",
                         operation == COW_IOPS ? DEEP : 1);
        if (isnan(ns)) {
            ns = bench_drive(c, "driver=raw,file.driver=file,file.aio=threads", "unsafe",
                             operation == COW_IOPS ? DEEP : 1);
        }
        series_add_value(&c->raw[operation], ns, ns);
    }
    bench_remove(c->bench, TOP);
    return r;
}

static void write_share(void *opaque, unsigned thread)
{
    const struct writer *writer = opaque;
    uint64_t steps = writer->size / STEP, first = steps * thread / writer->threads,
             end = steps * (thread + 1) / writer->threads;

    for (uint64_t step = first; step < end; step++) {
        memcpy(writer->memory + step * STEP, writer->source, PCOW_PAGE_SIZE);
        __asm__ volatile("" ::: "memory");
    }
}

static int time_writes(const struct comparison *c, struct writer *writer, double *ns,
                       struct pcow_error *error)
{
    uint64_t start = now_ns();
    int r = run_threads(writer->threads, write_share, writer, error);

    *ns = (double)(now_ns() - start) / (double)(c->bench->size / STEP);
    return r;
}

static int verify_writes(const struct comparison *c, enum operation operation,
                         const struct writer *writer, struct pcow_error *error)
{
    for (uint64_t at = 0; at < c->bench->size; at += STEP) {
        if (memcmp(writer->memory + at, writer->source, PCOW_PAGE_SIZE)) {
            return fail(error, -EILSEQ, "%s: wrong data at offset %llu", names[operation],
                        (unsigned long long)at);
        }
    }
    return 0;
}

/* The published method with blocks that are there before, as in the rows about traps. */
static int measure_paper(struct comparison *c, enum operation operation, struct pcow_error *error)
{
    struct paper_options options = {.size = c->bench->size,
                                    .cluster_size = STEP,
                                    .fine_grained = true,
                                    .preallocated = true,
                                    .base = operation == EXPANSION_LATENCY ? NULL : RAW_FILE};
    uint64_t *source = slab_buffer();
    struct writer writer = {.size = c->bench->size,
                            .threads = operation == COW_IOPS ? MAX_THREADS : 1,
                            .source = source};
    struct paper *paper = NULL;
    int r = bench_need(c->bench, c->bench->size + SLACK, error);
    double ns;

    r = r || source ? r : fail(error, -ENOMEM, "out of memory");
    r = r ? r : paper_open(c->bench, &options, &paper, error);
    if (!r) {
        fill_slab(source, 1);
        writer.memory = paper_memory(paper);
        r = time_writes(c, &writer, &ns, error);
        r = r ? r : paper_check(paper, error);
        r = r ? r : verify_writes(c, operation, &writer, error);
        series_add_value(&c->paper[operation], ns, ns);
        paper_close(paper);
    }
    free(source);
    return r;
}

/*
 * prepared: the thread that prepares slabs is ahead of the writes; else it begins with the first.
 */
static int measure_pcow(struct comparison *c, enum operation operation, bool prepared,
                        struct pcow_error *error)
{
    uint64_t *source = slab_buffer();
    struct writer writer = {.size = c->bench->size,
                            .threads = operation == COW_IOPS ? MAX_THREADS : 1,
                            .source = source};
    struct side side = {0};
    int r = bench_need(c->bench, c->bench->size + SLACK, error);
    double ns;

    r = r || source ? r : fail(error, -ENOMEM, "out of memory");
    r = r ? r
          : side_open_prepared(c->bench, &side, operation == EXPANSION_LATENCY ? NULL : BASE_IMAGE,
                               c->bench->size, STEP, bench_default_engine(c->bench),
                               prepared ? (unsigned)(c->bench->size / PCOW_SLAB_SIZE) : 0, error);
    if (!r) {
        fill_slab(source, 1);
        writer.memory = side.memory;
        r = time_writes(c, &writer, &ns, error);
        series_add_value(prepared ? &c->pcow[operation] : &c->unprepared[operation], ns, ns);
        r = r ? r : verify_writes(c, operation, &writer, error);
        side_close(c->bench, &side);
    }
    free(source);
    return r;
}

/* The setting whose median is the least, among those that work here. */
static unsigned best_setting(const struct series series[SETTINGS])
{
    unsigned best = 0;

    for (unsigned i = 1; i < SETTINGS; i++) {
        if (series[i].count && !(series_value(&series[best]) <= series_value(&series[i]))) {
            best = i;
        }
    }
    return best;
}

static int measure(struct comparison *c, enum operation operation, struct pcow_error *error)
{
    unsigned best = 0;
    int r = 0;

    for (unsigned repetition = 0; repetition < c->bench->repeat && !r; repetition++) {
        for (unsigned i = 0; i < SETTINGS && !r; i++) {
            /* Later only those that are shown. */
            if (repetition == 0 || i == 0 || i == best) {
                r = measure_qcow2(c, operation, i, error);
            }
        }
        best = repetition == 0 ? best_setting(c->qcow2[operation]) : best;
        r = r ? r : measure_raw(c, operation, error);
        if (!r && (operation != EXPANSION_LATENCY || !c->bench->paper_problem)) {
            r = measure_paper(c, operation, error);
        }
        r = r ? r : measure_pcow(c, operation, true, error);
        r = r ? r : measure_pcow(c, operation, false, error);
    }
    return r;
}

static int add_row(const struct comparison *c, enum operation operation, struct pcow_error *error)
{
    struct row *row =
        bench_add_row(c->bench, names[operation], operation == COW_IOPS ? MAX_THREADS : 1,
                      engine_name(bench_default_engine(c->bench)));
    const struct series *qcow2 = c->qcow2[operation];
    unsigned best = best_setting(qcow2);

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&c->raw[operation]);
    row->paper_ns = series_value(&c->paper[operation]);
    row->pcow_ns = series_value(&c->pcow[operation]);
    row_add_criterion_at_least(row, "qcow2/pcow", series_value(&qcow2[0]) / row->pcow_ns, AT_LEAST);
    row_add_criterion_at_least(row, "best qcow2/pcow", series_value(&qcow2[best]) / row->pcow_ns,
                               AT_LEAST);
    row_add_detail(row, "unprepared_ns", series_value(&c->unprepared[operation]));
    row_add_detail(row, "qcow2_ns", series_value(&qcow2[0]));
    row_add_detail(row, "qcow2_best_ns", series_value(&qcow2[best]));
    if (operation == COW_IOPS) {
        row_add_detail(row, "pcow_iops", 1e9 / row->pcow_ns);
        row_add_detail(row, "qcow2_iops", 1e9 / series_value(&qcow2[0]));
        row_add_detail(row, "qcow2_best_iops", 1e9 / series_value(&qcow2[best]));
    }
    snprintf(
        row->note, sizeof(row->note),
        "best qcow2: %s; both qcow2 and raw here are calls of QEMU's block layer, without a guest",
        settings[best].name);
    return 0;
}

/* The base of the same content as pcow's. */
static int make_base(const struct comparison *c, struct pcow_error *error)
{
    char command[COMMAND_LENGTH], line[256];

    snprintf(command, sizeof(command),
             "qemu-img convert -f raw -O qcow2 '%s/" RAW_FILE "' '%s/" BASE "' 2>&1 </dev/null",
             c->bench->directory, c->bench->directory);
    return run_command(command, line, error);
}

static bool wants(const struct bench *bench)
{
    for (const char *const *name = names; *name; name++) {
        if (bench_wants(bench, *name)) {
            return true;
        }
    }
    return false;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    char probe[] = "qemu-img --version 2>&1", line[256];
    struct comparison *c;
    int r;

    if (!wants(bench)) {
        return 0;
    }
    if (strpbrk(bench->directory, "',") || run_command(probe, line, error)) {
        bench->qcow2_problem = strpbrk(bench->directory, "',")
                                   ? "the path of the pool has a quote or a comma in it"
                                   : "qemu-img is not installed";
        return 0;
    }
    c = calloc(1, sizeof(*c));
    if (!c) {
        return fail(error, -ENOMEM, "out of memory");
    }
    c->bench = bench;
    r = ensure_content(bench, true, error);
    r = r ? r : bench_need(bench, 2 * bench->size + SLACK, error);
    r = r ? r : make_base(c, error);
    for (unsigned operation = 0; operation < OPERATIONS && !r; operation++) {
        if (bench_wants(bench, names[operation])) {
            r = measure(c, operation, error);
            r = r ? r : add_row(c, operation, error);
        }
    }
    bench_remove(bench, BASE);
    free(c);
    return r;
}

const struct group qcow2_group = {names, run};
