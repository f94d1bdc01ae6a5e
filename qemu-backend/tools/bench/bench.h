/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What all rows of the benchmark share: the run, its directory in the pool, and the rows measured
 * so far.
 */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <pcow.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_CRITERIA 3
#define MAX_DETAILS 16
#define NOTE_LENGTH 256
#define MAX_THREADS 2

/* A bound that the project set itself: value <= bound, or value >= bound if at_least. */
struct criterion {
    const char *what;                          /* "pcow/raw", "pcow/limit", "ns", ... */
    double value, bound;
    bool at_least;
};

struct detail {
    const char *key;
    double value;
};

/* All times in nanoseconds per operation; NAN where there is nothing to say. */
struct row {
    const char *name;
    unsigned threads;
    const char *engine;
    /* the same operation on a linear mapping of a pre-written file */
    double raw_ns, raw_p99_ns, raw_p999_ns;
    /* what the hardware and the kernel take for the same work at once */
    double limit_ns;
    double paper_ns;                           /* the published method, re-implemented */
    double pcow_ns, pcow_p99_ns, pcow_p999_ns;
    struct criterion criteria[MAX_CRITERIA];
    unsigned criterion_count;
    struct detail details[MAX_DETAILS];
    unsigned detail_count;
    char note[NOTE_LENGTH];                    /* what the numbers do not say; "" if nothing */
};

struct limits {
    /* two readings of the clock; subtracted from every sample */
    double clock_ns;
    /* write fault on a linear mapping of a pre-written file, by threads - 1 */
    double fault_ns[MAX_THREADS];
    /* from and to memory that is not in the caches */
    double memcpy_4k_ns, memcpy_64k_ns, memcpy_2m_ns;
    double flush_line_ns;                      /* store, write back, fence */
};

struct bench {
    char *directory;                           /* of this run only, inside the pool */
    char *outer_directory;                     /* while huge.c put another in its place */
    char *pool;                                /* as shown */
    /* working set of each side, bytes; multiple of a slab */
    uint64_t size;
    unsigned repeat;
    bool quick;
    bool no_mirror;                            /* images have no mirror of their metadata */
    const char *const *wanted;                 /* NULL-terminated; NULL: all rows */
    enum pcow_persistence persistence;
    const char *minor_problem;                 /* why there is no engine minor; NULL: there is */
    /* why the paper's first touch and snapshots were left out; NULL: they were not */
    const char *paper_problem;
    /* why the rows about huge pages were left out; NULL: they were not */
    const char *huge_problem;
    const char *qcow2_problem;                 /* the same of those beside qcow2 */
    /* the best instruction of this CPU, without a fence */
    void (*flush_lines)(const void *address, size_t length);
    const char *flush_instruction;
    struct limits limits;
    struct row *rows;
    size_t row_count;
};

/* Make the directory of this run in pool (NULL: /dev/shm) and probe the machine. */
int bench_begin(struct bench *bench, const char *pool, struct pcow_error *error);
/* Remove the directory with all in it and free everything. */
void bench_end(struct bench *bench);

bool bench_wants(const struct bench *bench, const char *name);
/* What QEMU chooses for such a pool without KVM. */
enum pcow_engine bench_default_engine(const struct bench *bench);
/* Path of a file in the directory of this run; the caller's buffer. */
const char *bench_path(const struct bench *bench, const char *name, char path[4096]);
void bench_remove(const struct bench *bench, const char *name);
/*
 * -ENOSPC with a sentence if there are less than size bytes left where bench->directory is (in
 * memory, if that is where it keeps them), -EINTR after a signal.
 */
int bench_need(const struct bench *bench, uint64_t size, struct pcow_error *error);

/* A new row with every number NAN; NULL when out of memory. */
struct row *bench_add_row(struct bench *bench, const char *name, unsigned threads,
                          const char *engine);
void row_add_criterion(struct row *row, const char *what, double value, double at_most);
void row_add_criterion_at_least(struct row *row, const char *what, double value, double at_least);
bool criterion_met(const struct criterion *criterion);
void row_add_detail(struct row *row, const char *key, double value);
/* 1 all criteria are met, 0 one is not, -1 there are none. */
int row_met(const struct row *row);

/*
 * As a guest makes stores durable: write back and fence where the pool is persistent memory,
 * nothing else elsewhere.
 */
void bench_persist(const struct bench *bench, const void *address, size_t length);

/* One group of rows each; they measure what bench_wants() and add their rows. */
struct group {
    const char *const *names;                  /* NULL-terminated */
    int (*run)(struct bench *bench, struct pcow_error *error);
};

extern const struct group first_touch_group, copy_group, steady_group, open_group, scattered_group,
    snapshot_group, freeze_group, large_group, qcow2_group;

/* limits.c; first, as the rows refer to them. */
int measure_limits(struct bench *bench, struct pcow_error *error);

/* report: human.c, json.c */
void print_table(const struct bench *bench);
/* path: NULL for stdout.  Returns an exit status. */
int write_json(const struct bench *bench, const char *path);

#endif
