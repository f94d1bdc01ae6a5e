/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Open and map a large image whose clusters lie in random order in the file. The image is complete,
 * but the blocks behind all pages of a slab but one are given back to the pool: opening and mapping
 * touch only metadata, and so the row needs a few hundred megabytes instead of 16 GiB.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "paper.h"
#include "report.h"
#include "sample.h"
#include "sides.h"

#define NAME "open-map"
#define FILE_NAME "open.pcow"
#define RAW_NAME "open.raw"
#define SIZE (UINT64_C(16) << 30)
#define QUICK_SIZE (UINT64_C(1) << 30)
#define ROUNDS 4u                              /* for each repetition */
#define AT_MOST_NS 30e6
#define AT_MOST_VMAS 10000
#define AT_MOST_MEMORY 0.1                     /* per cent */
#define SLACK (UINT64_C(256) << 20)
#define SEED UINT64_C(0x6f70656e)

struct open_row {
    struct bench *bench;
    uint64_t size;
    uint64_t *order;                           /* of clusters, for the paper's method */
    struct series raw, paper, pcow, map;
    unsigned vmas;
    size_t memory;                             /* of the monitor, bytes */
    uint64_t paper_mapped;
    char path[4096], raw_path[4096];
};

/*
 * Write one slab, keep its first page, punch the rest out behind the library's back: a hole reads
 * as zeros.
 */
static int write_slab(pcow_image *image, int fd, uint64_t slab, uint64_t *buffer,
                      struct pcow_error *error)
{
    struct pcow_extent extent;
    uint64_t at = slab * PCOW_SLAB_SIZE;
    int r;

    buffer[0] = page_mark(slab);
    r = pcow_write(image, at, buffer, PCOW_SLAB_SIZE, error);
    r = r ? r : pcow_get_extent(image, at, PCOW_SLAB_SIZE, &extent, error);
    if (!r && extent.length != PCOW_SLAB_SIZE) {
        r = fail(error, -EPROTO, "a slab written at once lies in pieces");
    }
    if (!r
        && fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     (off_t)(extent.file_offset + PCOW_PAGE_SIZE),
                     (off_t)(PCOW_SLAB_SIZE - PCOW_PAGE_SIZE))) {
        r = fail(error, -errno, "the pool cannot punch holes: %s", strerror(errno));
    }
    return r;
}

static int build(struct open_row *o, struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = o->size,
                                           .no_mirror = o->bench->no_mirror};
    uint64_t slabs = o->size / PCOW_SLAB_SIZE, seed = SEED, *order = calloc(slabs, sizeof(*order)),
             *buffer = slab_buffer();
    pcow_image *image = NULL;
    int fd = -1, r = order && buffer ? pcow_create(o->path, &options, error)
                                     : fail(error, -ENOMEM, "out of memory");

    r = r ? r : pcow_open(o->path, PCOW_OPEN_WRITE, NULL, &image, error);
    if (!r) {
        fd = open(o->path, O_RDWR | O_CLOEXEC);
        r = fd < 0 ? fail(error, -errno, "cannot open %s: %s", o->path, strerror(errno)) : 0;
    }
    for (uint64_t i = 0; i < slabs && order && buffer; i++) {
        order[i] = i;
    }
    if (!r) {
        memset(buffer, 0, PCOW_SLAB_SIZE);
        /*
         * Clusters of one slab share its place in the file, so the order of slabs is the order of
         * clusters.
         */
        shuffle(order, slabs, &seed);
    }
    for (uint64_t i = 0; i < slabs && !r; i++) {
        r = write_slab(image, fd, order[i], buffer, error);
    }
    r = r ? r : pcow_flush(image, error);
    pcow_close(image);
    if (fd >= 0) {
        close(fd);
    }
    free(order);
    free(buffer);
    return r;
}

static int prepare(struct open_row *o, struct pcow_error *error)
{
    uint64_t clusters = o->size / PCOW_DEFAULT_CLUSTER_SIZE, seed = SEED;
    int fd = open(bench_path(o->bench, RAW_NAME, o->raw_path), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int r = fd < 0 || ftruncate(fd, (off_t)o->size)
                ? fail(error, -errno, "cannot make %s: %s", o->raw_path, strerror(errno))
                : 0;

    if (fd >= 0) {
        close(fd);
    }
    o->order = calloc(clusters, sizeof(*o->order));
    if (!r && !o->order) {
        r = fail(error, -ENOMEM, "out of memory");
    }
    for (uint64_t i = 0; i < clusters && !r; i++) {
        o->order[i] = i;
    }
    if (!r) {
        shuffle(o->order, clusters, &seed);
        r = build(o, error);
    }
    return r;
}

static int time_raw_and_paper(struct open_row *o, double *raw_ns, double *paper_ns,
                              struct pcow_error *error)
{
    uint64_t clusters = o->size / PCOW_DEFAULT_CLUSTER_SIZE, elapsed, start = now_ns();
    int fd = open(o->raw_path, O_RDWR | O_CLOEXEC);
    void *memory =
             fd < 0 ? MAP_FAILED : mmap(NULL, o->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0),
         *reservation;
    uint8_t *place;

    *raw_ns = (double)(now_ns() - start) - o->bench->limits.clock_ns;
    if (memory == MAP_FAILED) {
        if (fd >= 0) {
            close(fd);
        }
        return fail(error, -errno, "cannot map %s: %s", o->raw_path, strerror(errno));
    }
    munmap(memory, o->size);
    place = reserve_aligned(o->size, &reservation);
    if (!place) {
        close(fd);
        return fail(error, -ENOMEM, "no address space for %s", o->raw_path);
    }
    o->paper_mapped =
        paper_map_clusters(place, fd, o->order, clusters, PCOW_DEFAULT_CLUSTER_SIZE, &elapsed);
    *paper_ns = o->paper_mapped == clusters ? (double)elapsed : NAN;
    release_aligned(reservation, o->size);
    close(fd);
    return 0;
}

static int verify(const struct open_row *o, const uint8_t *memory, struct pcow_error *error)
{
    for (uint64_t slab = 0; slab < o->size / PCOW_SLAB_SIZE; slab++) {
        const uint64_t *words = (const uint64_t *)(memory + slab * PCOW_SLAB_SIZE);

        if (words[0] != page_mark(slab) || words[PCOW_PAGE_SIZE / sizeof(*words)]) {
            return fail(error, -EILSEQ, "%s: slab %llu holds wrong data", NAME,
                        (unsigned long long)slab);
        }
    }
    return 0;
}

static int time_pcow(struct open_row *o, double *open_ns, double *map_ns, bool check,
                     struct pcow_error *error)
{
    pcow_image *image = NULL;
    pcow_map *map = NULL;
    struct pcow_map_stats stats;
    uint64_t start = now_ns(), opened;
    int r = pcow_open(o->path, PCOW_OPEN_WRITE, NULL, &image, error);

    opened = now_ns();
    r = r ? r : pcow_map_create(image, NULL, &map, error);
    *map_ns = (double)(now_ns() - opened);
    *open_ns = (double)(now_ns() - start) - o->bench->limits.clock_ns;
    if (!r) {
        o->vmas = count_mappings(pcow_map_address(map), o->size);
        pcow_map_get_stats(map, &stats);
        o->memory = stats.memory;
        r = check ? verify(o, pcow_map_address(map), error) : 0;
        pcow_map_destroy(map);
    }
    pcow_close(image);
    return r;
}

static int repeat(struct open_row *o, unsigned repetition, struct pcow_error *error)
{
    double raw[ROUNDS], paper[ROUNDS], pcow[ROUNDS], map[ROUNDS];
    int r = bench_need(o->bench, 0, error);

    for (unsigned round = 0; round < ROUNDS && !r; round++) {
        r = time_raw_and_paper(o, &raw[round], &paper[round], error);
        r = r ? r : time_pcow(o, &pcow[round], &map[round], repetition == 0 && round == 0, error);
    }
    if (!r) {
        series_add(&o->raw, raw, ROUNDS, 0);
        series_add(&o->pcow, pcow, ROUNDS, 0);
        series_add(&o->map, map, ROUNDS, 0);
        if (!isnan(paper[0])) {
            series_add(&o->paper, paper, ROUNDS, 0);
        }
    }
    return r;
}

static int add_row(struct open_row *o, struct pcow_error *error)
{
    struct row *row = bench_add_row(o->bench, NAME, 1, engine_name(PCOW_ENGINE_SIGNAL));

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&o->raw);
    row->raw_p99_ns = series_p99(&o->raw);
    row->paper_ns = series_value(&o->paper);
    row->pcow_ns = series_value(&o->pcow);
    row->pcow_p99_ns = series_p99(&o->pcow);
    /* The targets are about 16 GiB. */
    if (o->size == SIZE) {
        row_add_criterion(row, "ns", row->pcow_ns, AT_MOST_NS);
        row_add_criterion(row, "vmas", o->vmas, AT_MOST_VMAS);
        row_add_criterion(row, "monitor's memory, % of mapped",
                          100.0 * (double)o->memory / (double)o->size, AT_MOST_MEMORY);
    }
    row_add_detail(row, "monitor_bytes", (double)o->memory);
    row_add_detail(row, "image_bytes", (double)o->size);
    row_add_detail(row, "samples", (double)ROUNDS * o->bench->repeat);
    row_add_detail(row, "vmas", o->vmas);
    row_add_detail(row, "map_ns", series_value(&o->map));
    row_add_detail(row, "paper_clusters", (double)(o->size / PCOW_DEFAULT_CLUSTER_SIZE));
    row_add_detail(row, "paper_clusters_mapped", (double)o->paper_mapped);
    return 0;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    struct open_row *o;
    int r;

    if (!bench_wants(bench, NAME)) {
        return 0;
    }
    r = bench_need(bench, SLACK, error);
    if (r) {
        return r;
    }
    o = calloc(1, sizeof(*o));
    if (!o) {
        return fail(error, -ENOMEM, "out of memory");
    }
    o->bench = bench;
    o->size = bench->quick ? QUICK_SIZE : SIZE;
    bench_path(bench, FILE_NAME, o->path);
    r = prepare(o, error);
    for (unsigned repetition = 0; repetition < bench->repeat && !r; repetition++) {
        r = repeat(o, repetition, error);
    }
    r = r ? r : add_row(o, error);
    bench_remove(bench, FILE_NAME);
    bench_remove(bench, RAW_NAME);
    free(o->order);
    free(o);
    return r;
}

static const char *const names[] = {NAME, NULL};

const struct group open_group = {names, run};
