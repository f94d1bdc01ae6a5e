/* SPDX-License-Identifier: BSD-3-Clause */
#include "bench.h"

#include <cpuid.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "interrupt.h"
#include "machine.h"
#include "report.h"
#include "sides.h"
#include "size.h"
#include "uffd.h"

#define CACHE_LINE 64u
#define DEFAULT_POOL "/dev/shm"

#define DEFINE_FLUSH(name, attribute, instruction)                                \
    static attribute void name(const void *address, size_t length)                \
    {                                                                             \
        uintptr_t line = (uintptr_t)address & ~(uintptr_t)(CACHE_LINE - 1);       \
                                                                                  \
        for (; line < (uintptr_t)address + length; line += CACHE_LINE) {          \
            instruction((void *)line);                                            \
        }                                                                         \
    }

DEFINE_FLUSH(flush_clwb, __attribute__((target("clwb"))), _mm_clwb)
DEFINE_FLUSH(flush_clflushopt, __attribute__((target("clflushopt"))), _mm_clflushopt)
DEFINE_FLUSH(flush_clflush, , _mm_clflush)

/* CPUID leaf 7: EBX bit 24 clwb, bit 23 clflushopt (Intel SDM vol. 2, CPUID). */
static void choose_flush(struct bench *bench)
{
    unsigned eax, ebx = 0, ecx, edx;

    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        ebx = 0;
    }
    bench->flush_lines = ebx & 1u << 24   ? flush_clwb
                         : ebx & 1u << 23 ? flush_clflushopt
                                          : flush_clflush;
    bench->flush_instruction = ebx & 1u << 24 ? "clwb" : ebx & 1u << 23 ? "clflushopt" : "clflush";
}

/* A map says which engine it has got. */
static int find_minor(struct bench *bench, struct pcow_error *error)
{
    struct pcow_map_stats stats;
    struct side side;
    int r = side_open(bench, &side, NULL, PCOW_SLAB_SIZE, 0, PCOW_ENGINE_MINOR, error);

    if (r) {
        return r;
    }
    pcow_map_get_stats(side.map, &stats);
    bench->minor_problem = stats.engine == PCOW_ENGINE_MINOR
                               ? NULL
                               : "it needs a pool on tmpfs and Linux 5.19 or later";
    side_close(bench, &side);
    return 0;
}

enum pcow_engine bench_default_engine(const struct bench *bench)
{
    return bench->minor_problem ? PCOW_ENGINE_SIGNAL : PCOW_ENGINE_MINOR;
}

int bench_begin(struct bench *bench, const char *pool, struct pcow_error *error)
{
    int fd, r;

    choose_flush(bench);
    bench->pool = realpath(pool ? pool : DEFAULT_POOL, NULL);
    if (!bench->pool) {
        return fail(error, -errno, "no pool at %s: %s; name a directory with --pool",
                    pool ? pool : DEFAULT_POOL, strerror(errno));
    }
    r = pcow_probe_persistence(bench->pool, &bench->persistence, error);
    if (r) {
        return r;
    }
    if (asprintf(&bench->directory, "%s/pcow-bench.XXXXXX", bench->pool) < 0) {
        bench->directory = NULL;
        return fail(error, -ENOMEM, "out of memory");
    }
    if (!mkdtemp(bench->directory)) {
        r = fail(error, -errno, "cannot make a directory in %s: %s", bench->pool, strerror(errno));
        free(bench->directory);
        bench->directory = NULL;
        return r;
    }
    fd = bench_uffd_open();
    bench->paper_problem =
        fd >= 0 ? NULL
                : "userfaultfd is not available to this user; give it access to /dev/userfaultfd";
    if (fd >= 0) {
        close(fd);
    }
    return find_minor(bench, error);
}

void bench_end(struct bench *bench)
{
    DIR *directory = bench->directory ? opendir(bench->directory) : NULL;
    const struct dirent *entry;

    while (directory && (entry = readdir(directory))) {
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")
            && unlinkat(dirfd(directory), entry->d_name, 0) && errno == EISDIR) {
            unlinkat(dirfd(directory), entry->d_name, AT_REMOVEDIR);
        }
    }
    if (directory) {
        closedir(directory);
    }
    if (bench->directory && rmdir(bench->directory)) {
        report("cannot remove %s: %s; remove it by hand", bench->directory, strerror(errno));
    }
    free(bench->directory);
    free(bench->pool);
    free(bench->rows);
}

bool bench_wants(const struct bench *bench, const char *name)
{
    for (const char *const *wanted = bench->wanted; wanted && *wanted; wanted++) {
        if (!strcmp(*wanted, name)) {
            return true;
        }
    }
    return !bench->wanted;
}

const char *bench_path(const struct bench *bench, const char *name, char path[4096])
{
    snprintf(path, 4096, "%s/%s", bench->directory, name);
    return path;
}

void bench_remove(const struct bench *bench, const char *name)
{
    char path[4096];

    unlink(bench_path(bench, name, path));
}

int bench_need(const struct bench *bench, uint64_t size, struct pcow_error *error)
{
    struct statvfs space;
    char need[SIZE_TEXT_LENGTH], have[SIZE_TEXT_LENGTH];
    uint64_t left;

    if (interrupt_pending()) {
        return fail(error, -EINTR, "interrupted");
    }
    if (statvfs(bench->directory, &space)) {
        return fail(error, -errno, "cannot look at the space of %s: %s", bench->directory,
                    strerror(errno));
    }
    left = (uint64_t)space.f_bavail * space.f_frsize;
    if (bench->persistence == PCOW_PERSISTENCE_VOLATILE && memory_available() < left) {
        left = memory_available();
    }
    if (left < size) {
        return fail(error, -ENOSPC,
                    "%s has %s left and %s are needed; name a larger pool with --pool, or a "
                    "smaller working set "
                    "with --size or --quick",
                    bench->pool, format_size(left, have), format_size(size, need));
    }
    return 0;
}

struct row *bench_add_row(struct bench *bench, const char *name, unsigned threads,
                          const char *engine)
{
    struct row *rows = realloc(bench->rows, (bench->row_count + 1) * sizeof(*rows)), *row;

    if (!rows) {
        return NULL;
    }
    bench->rows = rows;
    row = &rows[bench->row_count++];
    *row = (struct row){.name = name,
                        .threads = threads,
                        .engine = engine,
                        .raw_ns = NAN,
                        .raw_p99_ns = NAN,
                        .raw_p999_ns = NAN,
                        .limit_ns = NAN,
                        .paper_ns = NAN,
                        .pcow_ns = NAN,
                        .pcow_p99_ns = NAN,
                        .pcow_p999_ns = NAN};
    return row;
}

void row_add_criterion(struct row *row, const char *what, double value, double at_most)
{
    if (row->criterion_count < MAX_CRITERIA) {
        row->criteria[row->criterion_count++] = (struct criterion){what, value, at_most, false};
    }
}

void row_add_criterion_at_least(struct row *row, const char *what, double value, double at_least)
{
    if (row->criterion_count < MAX_CRITERIA) {
        row->criteria[row->criterion_count++] = (struct criterion){what, value, at_least, true};
    }
}

/* What could not be measured (NAN) meets nothing. */
bool criterion_met(const struct criterion *criterion)
{
    return criterion->at_least ? criterion->value >= criterion->bound
                               : criterion->value <= criterion->bound;
}

void row_add_detail(struct row *row, const char *key, double value)
{
    if (row->detail_count < MAX_DETAILS) {
        row->details[row->detail_count++] = (struct detail){key, value};
    }
}

int row_met(const struct row *row)
{
    int met = row->criterion_count ? 1 : -1;

    for (unsigned i = 0; i < row->criterion_count; i++) {
        if (!criterion_met(&row->criteria[i])) {
            met = 0;
        }
    }
    return met;
}

void bench_persist(const struct bench *bench, const void *address, size_t length)
{
    if (bench->persistence == PCOW_PERSISTENCE_PMEM) {
        bench->flush_lines(address, length);
        _mm_sfence();
    }
}
