/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Random stores of 4 KiB to a large image on a shared base, until every cluster of 64 KiB was hit:
 * the address space must stay within the budget of memory mappings.
 *
 * 64 GiB do not fit into the memory of most machines. What was copied is verified soon after and
 * its blocks are then given back behind the library's back, those of the base too; mappings and
 * metadata, which this row is about, are those of 64 GiB. Holes read as zeros, so the base is one
 * of zeros, but for the first page of each slab.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "paper.h"
#include "report.h"
#include "sample.h"
#include "sides.h"

#define NAME "scattered-writes"
#define BASE "scattered-base.pcow"
#define RAW_NAME "scattered-raw"
#define SIZE (UINT64_C(64) << 30)
/* enough for the budget to act with the kernel's default vm.max_map_count */
#define QUICK_SIZE (UINT64_C(2) << 30)
#define CLUSTER PCOW_DEFAULT_CLUSTER_SIZE
#define CLUSTERS_PER_SLAB (PCOW_SLAB_SIZE / CLUSTER)
#define PAGES_PER_CLUSTER (CLUSTER / PCOW_PAGE_SIZE)
#define WORDS_PER_PAGE (PCOW_PAGE_SIZE / sizeof(uint64_t))
/* stores before their slabs are given back: at most 2 GiB */
#define BATCH 1024u
#define QUICK_BATCH 64u
/* batches; the kernel takes milliseconds to list tens of thousands of mappings */
#define LOOK_EVERY 16u
#define SLACK_BATCHES 2u
#define SLACK (UINT64_C(512) << 20)
#define SEED UINT64_C(0x73636174)
#define AT_MOST_P99_US 1000            /* a store when mappings are short */

struct scattered {
    struct bench *bench;
    uint64_t size, clusters;
    size_t batch;                              /* stores */
    uint64_t *order;                           /* of clusters */
    uint8_t *page_of;                          /* by cluster: the page that is stored to */
    double *samples;                           /* of each store */
    /* by slab, of the top image: it holds copies that are to be given back */
    uint8_t *punched;
    struct series raw, pcow;
    enum pcow_engine engine;
    size_t batches;
    /* mappings: as the monitor counts them, as the kernel does, and the limit */
    unsigned peak, peak_seen, budget;
    uint64_t promoted, paper_clusters;
    char base_path[4096], top_path[4096];
};

static int punch(int fd, uint64_t offset, uint64_t length, struct pcow_error *error)
{
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length) ?
           fail(error, -errno, "the pool cannot punch holes: %s", strerror(errno)) : 0;
}

/* Give back the blocks of one slab of an image but those of its first page. */
static int punch_slab(pcow_image *image, int fd, uint64_t slab, struct pcow_error *error)
{
    uint64_t at = slab * PCOW_SLAB_SIZE, end = at + PCOW_SLAB_SIZE;
    int r = 0;

    while (at < end && !r) {
        struct pcow_extent extent;

        r = pcow_get_extent(image, at, end - at, &extent, error);
        if (!r && extent.present && extent.depth == 0) {
            uint64_t keep = at % PCOW_SLAB_SIZE == 0 ? PCOW_PAGE_SIZE : 0;

            if (extent.length > keep) {
                r = punch(fd, extent.file_offset + keep, extent.length - keep, error);
            }
        }
        at += r ? 0 : extent.length;
    }
    return r;
}

static int build_base(struct scattered *s, struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = s->size,
                                           .no_mirror = s->bench->no_mirror};
    uint64_t *buffer = slab_buffer();
    pcow_image *image = NULL;
    int fd = -1, r = buffer ? pcow_create(s->base_path, &options, error)
                            : fail(error, -ENOMEM, "out of memory");

    r = r ? r : pcow_open(s->base_path, PCOW_OPEN_WRITE, NULL, &image, error);
    if (!r) {
        fd = open(s->base_path, O_RDWR | O_CLOEXEC);
        r = fd < 0 ? fail(error, -errno, "cannot open %s: %s", s->base_path, strerror(errno)) : 0;
    }
    if (!r) {
        memset(buffer, 0, PCOW_SLAB_SIZE);
    }
    for (uint64_t slab = 0; slab < s->size / PCOW_SLAB_SIZE && !r; slab++) {
        for (size_t i = 0; i < WORDS_PER_PAGE; i++) {
            buffer[i] = page_pattern(slab);
        }
        r = bench_need(s->bench, 0, error);
        r = r ? r : pcow_write(image, slab * PCOW_SLAB_SIZE, buffer, PCOW_SLAB_SIZE, error);
        r = r ? r : punch_slab(image, fd, slab, error);
    }
    r = r ? r : pcow_flush(image, error);
    r = r ? r : pcow_seal(image, error);
    pcow_close(image);
    if (fd >= 0) {
        close(fd);
    }
    free(buffer);
    return r;
}

static uint64_t page_number(const struct scattered *s, uint64_t cluster)
{
    return cluster * PAGES_PER_CLUSTER + s->page_of[cluster];
}

/* The whole cluster: one page was stored to, the others are the base's. */
static int verify_cluster(const struct scattered *s, const uint8_t *memory, uint64_t cluster,
                          struct pcow_error *error)
{
    uint64_t stored = page_number(s, cluster), first = cluster * PAGES_PER_CLUSTER, wrong = 0;

    for (uint64_t page = first; page < first + PAGES_PER_CLUSTER; page++) {
        const uint64_t *words = (const uint64_t *)(memory + page * PCOW_PAGE_SIZE);
        uint64_t slab = page * PCOW_PAGE_SIZE / PCOW_SLAB_SIZE;
        uint64_t expected = page == stored                           ? page_mark(page)
                            : page * PCOW_PAGE_SIZE % PCOW_SLAB_SIZE ? 0
                                                                     : page_pattern(slab);

        for (size_t i = 0; i < WORDS_PER_PAGE; i++) {
            wrong |= words[i] ^ expected;
        }
    }
    return wrong ? fail(error, -EILSEQ, NAME ": wrong data at offset %llu",
                        (unsigned long long)(cluster * CLUSTER))
                 : 0;
}

static void store_batch(struct scattered *s, uint8_t *memory, uint64_t first, size_t count)
{
    for (uint64_t i = first; i < first + count; i++) {
        uint64_t page = page_number(s, s->order[i]), start, mark = page_mark(page);
        uint64_t *words = (uint64_t *)(memory + page * PCOW_PAGE_SIZE);

        start = now_ns();
        for (size_t word = 0; word < WORDS_PER_PAGE; word++) {
            ((volatile uint64_t *)words)[word] = mark;
        }
        s->samples[i] = (double)(now_ns() - start) - s->bench->limits.clock_ns;
    }
}

static int give_back(struct scattered *s, pcow_image *image, int top, int base,
                     const uint64_t *clusters, size_t count, struct pcow_error *error)
{
    int r = 0;

    for (size_t i = 0; i < count && !r; i++) {
        uint64_t slab = clusters[i] / CLUSTERS_PER_SLAB;

        if (!s->punched[slab]) {
            s->punched[slab] = 1;
            r = punch_slab(image, top, slab, error);
            r = r ? r : punch_slab(pcow_base(image), base, slab, error);
        }
    }
    for (size_t i = 0; i < count; i++) {
        s->punched[clusters[i] / CLUSTERS_PER_SLAB] = 0;
    }
    return r;
}

/* How many mappings there are. */
static int look(struct scattered *s, const pcow_map *map, struct pcow_error *error)
{
    struct pcow_map_stats stats;
    unsigned seen = count_mappings(pcow_map_address(map), s->size);

    pcow_map_get_stats(map, &stats);
    s->peak = stats.vmas > s->peak ? stats.vmas : s->peak;
    s->peak_seen = seen > s->peak_seen ? seen : s->peak_seen;
    s->budget = stats.vma_budget;
    s->promoted = stats.slabs_promoted;
    return bench_need(s->bench, 0, error);
}

static int measure_pcow(struct scattered *s, struct pcow_error *error)
{
    struct side side;
    int top = -1, base = open(s->base_path, O_RDWR | O_CLOEXEC);
    int r = side_open(s->bench, &side, BASE, s->size, CLUSTER, s->engine, error);

    s->pcow = (struct series){0};
    s->peak = s->peak_seen = 0;
    if (!r) {
        top = open(s->top_path, O_RDWR | O_CLOEXEC);
        r = top < 0 || base < 0
                ? fail(error, -errno, "cannot open %s: %s", s->top_path, strerror(errno))
                : 0;
    }
    s->batches = 0;
    for (uint64_t first = 0; first < s->clusters && !r; first += s->batch) {
        size_t count = s->clusters - first < s->batch ? s->clusters - first : s->batch;

        store_batch(s, side.memory, first, count);
        for (size_t i = 0; i < count && !r; i++) {
            r = verify_cluster(s, side.memory, s->order[first + i], error);
        }
        s->batches++;
        r = r ? r : give_back(s, side.image, top, base, s->order + first, count, error);
        r = r || (s->batches % LOOK_EVERY && first + count < s->clusters)
                ? r
                : look(s, side.map, error);
    }
    series_add(&s->pcow, s->samples, s->clusters, true);
    side_close(s->bench, &side);
    if (top >= 0) {
        close(top);
    }
    if (base >= 0) {
        close(base);
    }
    return r;
}

/*
 * The file that was written before, mapped as often as it takes: as many pages, each with its own
 * fault.
 */
static int measure_raw(struct scattered *s, struct pcow_error *error)
{
    char path[4096];
    void *reservation = NULL;
    uint8_t *memory = reserve_aligned(s->size, &reservation);
    int fd = -1, r = memory ? raw_create(s->bench, RAW_NAME, s->bench->size, error)
                            : fail(error, -ENOMEM, "no address space");

    if (!r) {
        fd = open(bench_path(s->bench, RAW_NAME, path), O_RDWR | O_CLOEXEC);
        r = fd < 0 ? fail(error, -errno, "cannot open %s: %s", path, strerror(errno)) : 0;
    }

    for (uint64_t at = 0; at < s->size && !r; at += s->bench->size) {
        uint64_t length = s->size - at < s->bench->size ? s->size - at : s->bench->size;

        if (mmap(memory + at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
            == MAP_FAILED) {
            r = fail(error, -errno, "cannot map %s: %s", path, strerror(errno));
        }
    }
    for (uint64_t first = 0; first < s->clusters && !r; first += s->batch) {
        size_t count = s->clusters - first < s->batch ? s->clusters - first : s->batch;

        store_batch(s, memory, first, count);
        r = bench_need(s->bench, 0, error);
    }
    series_add(&s->raw, s->samples, s->clusters, true);
    release_aligned(reservation, s->size);
    if (fd >= 0) {
        close(fd);
    }
    bench_remove(s->bench, RAW_NAME);
    return r;
}

/* One mapping for each cluster: how far it comes, and what one costs until then. */
static int measure_paper(struct scattered *s, struct pcow_error *error)
{
    char path[4096];
    void *reservation = NULL;
    uint8_t *memory = reserve_aligned(s->size, &reservation);
    int fd =
        open(bench_path(s->bench, "scattered-paper", path), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    uint64_t elapsed = 0;
    int r = fd < 0 || !memory || ftruncate(fd, (off_t)s->size)
                ? fail(error, -errno, "cannot make %s: %s", path, strerror(errno))
                : 0;

    if (!r) {
        s->paper_clusters =
            paper_map_clusters(memory, fd, s->order, s->clusters, CLUSTER, &elapsed);
    }
    release_aligned(reservation, s->size);
    if (fd >= 0) {
        close(fd);
    }
    bench_remove(s->bench, "scattered-paper");
    return r;
}

static int prepare(struct scattered *s, struct pcow_error *error)
{
    uint64_t seed = SEED;

    s->order = calloc(s->clusters, sizeof(*s->order));
    s->page_of = calloc(s->clusters, 1);
    s->samples = calloc(s->clusters, sizeof(*s->samples));
    s->punched = calloc(s->size / PCOW_SLAB_SIZE, 1);
    if (!s->order || !s->page_of || !s->samples || !s->punched) {
        return fail(error, -ENOMEM, "out of memory");
    }
    for (uint64_t i = 0; i < s->clusters; i++) {
        s->order[i] = i;
        s->page_of[i] = (uint8_t)(random_next(&seed) % PAGES_PER_CLUSTER);
    }
    shuffle(s->order, s->clusters, &seed);
    return build_base(s, error);
}

static int add_row(struct scattered *s, struct pcow_error *error)
{
    struct row *row = bench_add_row(s->bench, NAME, 1, engine_name(s->engine));

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&s->raw);
    row->raw_p99_ns = series_p99(&s->raw);
    row->raw_p999_ns = series_p999(&s->raw);
    row->limit_ns = row->raw_ns + s->bench->limits.memcpy_64k_ns;
    row->pcow_ns = series_value(&s->pcow);
    row->pcow_p99_ns = series_p99(&s->pcow);
    row->pcow_p999_ns = series_p999(&s->pcow);
    row_add_criterion(row, "vmas", s->peak_seen > s->peak ? s->peak_seen : s->peak, s->budget);
    row_add_criterion(row, "p99, us", row->pcow_p99_ns / 1000, AT_MOST_P99_US);
    row_add_detail(row, "image_bytes", (double)s->size);
    row_add_detail(row, "stores", (double)s->clusters);
    row_add_detail(row, "vmas_peak", s->peak);
    row_add_detail(row, "vmas_peak_seen", s->peak_seen);
    row_add_detail(row, "vma_budget", s->budget);
    row_add_detail(row, "slabs_promoted", (double)s->promoted);
    row_add_detail(row, "paper_clusters", (double)s->clusters);
    row_add_detail(row, "paper_clusters_mapped", (double)s->paper_clusters);
    if (s->engine != bench_default_engine(s->bench)) {
        return 0;                      /* said once */
    }
    snprintf(row->note, sizeof(row->note),
             "blocks are given back when they are verified, for the image to fit into memory%s",
             s->paper_clusters < s->clusters ? "; the paper's method ends at vm.max_map_count"
                                             : "");
    return 0;
}

/* With the engine that is the default, and with signal: as kvm, that makes slabs whole. */
static int measure_engines(struct scattered *s, struct pcow_error *error)
{
    const enum pcow_engine engines[] = {bench_default_engine(s->bench), PCOW_ENGINE_SIGNAL};
    int r = 0;

    for (unsigned i = 0; i < 2 && !r; i++) {
        if (i && engines[i] == engines[0]) {
            break;
        }
        s->engine = engines[i];
        r = measure_pcow(s, error);
        r = r ? r : add_row(s, error);
    }
    return r;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    struct scattered *s;
    int r;

    if (!bench_wants(bench, NAME)) {
        return 0;
    }
    r = bench_need(bench,
                   bench->size + SLACK
                       + SLACK_BATCHES * (bench->quick ? QUICK_BATCH : BATCH) * PCOW_SLAB_SIZE,
                   error);
    if (r) {
        return r;
    }
    s = calloc(1, sizeof(*s));
    if (!s) {
        return fail(error, -ENOMEM, "out of memory");
    }
    s->bench = bench;
    s->size = bench->quick ? QUICK_SIZE : SIZE;
    s->clusters = s->size / CLUSTER;
    s->batch = bench->quick ? QUICK_BATCH : BATCH;
    bench_path(bench, BASE, s->base_path);
    bench_path(bench, TOP_IMAGE, s->top_path);
    r = prepare(s, error);
    r = r ? r : measure_paper(s, error);
    r = r ? r : measure_raw(s, error);
    r = r ? r : measure_engines(s, error);
    bench_remove(bench, BASE);
    free(s->order);
    free(s->page_of);
    free(s->samples);
    free(s->punched);
    free(s);
    return r;
}

static const char *const names[] = {NAME, NULL};

const struct group scattered_group = {names, run};
