/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What must not grow with the size of an image, nor with the number of its snapshots. There is no
 * such thing in raw memory: in its column stands pcow itself, with an image of 16 GiB, with 10
 * snapshots, with a quarter of the pages.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "huge.h"
#include "report.h"
#include "sample.h"
#include "sides.h"

#define GIB (UINT64_C(1) << 30)
#define SMALL (16 * GIB)
#define LARGE (16 * 1024 * GIB)
#define IMAGE "large.pcow"
#define OVERLAY "large-top.pcow"
#define AT_MOST 2.0                            /* times the small one's */
#define AT_MOST_NS 1e6                         /* of a snapshot */
#define SNAPSHOTS 16u                          /* for each repetition */
#define MAPS 4u
#define FULL_SLABS 16u                         /* stored to all over, before each snapshot */
#define USED_SLABS 1000u                       /* one page of each is used */
#define HOT_SIZE (UINT64_C(64) << 20)
#define FEW 10u
#define MANY 10000u
#define QUICK_MANY 500u
#define TRAPS 100u                             /* for each repetition */
#define REBASE_PAGES 16000u
#define QUICK_REBASE_PAGES 1600u
#define SLACK (UINT64_C(512) << 20)

enum { RAW, PCOW, SIDES };                     /* the columns */

struct large {
    struct bench *bench;
    struct series series[SIDES];
    double bytes[SIDES];                       /* of the monitor's memory */
};

static int create_image(const struct large *l, const char *name, uint64_t size,
                        uint64_t cluster_size, pcow_image **image, struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = size,
                                           .cluster_size = cluster_size,
                                           .no_mirror = l->bench->no_mirror};
    char path[4096];
    int r = pcow_create(bench_path(l->bench, name, path), &options, error);

    return r ? r : pcow_open(path, PCOW_OPEN_WRITE, NULL, image, error);
}

static int new_snapshot(pcow_image *image, unsigned number, struct pcow_error *error)
{
    char name[16];

    snprintf(name, sizeof(name), "s%u", number);
    return pcow_snapshot_create(image, name, error);
}

/* ---- create-16t ---------------------------------------------------------- */

static void store_to_slabs(uint8_t *memory, uint64_t size, unsigned slabs, size_t length, int byte)
{
    for (unsigned i = 0; i < slabs; i++) {
        memset(memory + size / slabs / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE * i, byte, length);
    }
}

static int time_create(struct large *l, unsigned side, struct pcow_error *error)
{
    uint64_t size = side == RAW ? SMALL : LARGE;
    double took[SNAPSHOTS];
    pcow_image *image = NULL;
    pcow_map *map = NULL;
    int r = create_image(l, IMAGE, size, 0, &image, error);

    r = r ? r : pcow_map_create(image, NULL, &map, error);
    for (unsigned i = 0; i < SNAPSHOTS && !r; i++) {
        uint64_t start;

        store_to_slabs(pcow_map_address(map), size, FULL_SLABS, PCOW_SLAB_SIZE, (int)i + 1);
        start = now_ns();
        r = new_snapshot(image, i, error);
        took[i] = (double)(now_ns() - start) - l->bench->limits.clock_ns;
    }
    if (!r) {
        series_add(&l->series[side], took, SNAPSHOTS, 0);
    }
    pcow_map_destroy(map);
    pcow_close(image);
    bench_remove(l->bench, IMAGE);
    return r;
}

/* ---- map-16t ------------------------------------------------------------- */

static int time_map(struct large *l, unsigned side, struct pcow_error *error)
{
    uint64_t size = side == RAW ? SMALL : LARGE, page[PCOW_PAGE_SIZE / sizeof(uint64_t)] = {1};
    unsigned slabs = l->bench->quick ? USED_SLABS / 10 : USED_SLABS;
    struct pcow_map_stats stats;
    pcow_image *image = NULL;
    double took[MAPS];
    int r = create_image(l, IMAGE, size, PCOW_PAGE_SIZE, &image, error);

    for (unsigned i = 0; i < slabs && !r; i++) {
        r = pcow_write(image, size / slabs / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE * i, page,
                       sizeof(page), error);
    }
    for (unsigned i = 0; i < MAPS && !r; i++) {
        uint64_t start = now_ns();
        pcow_map *map = NULL;

        r = pcow_map_create(image, NULL, &map, error);
        took[i] = (double)(now_ns() - start) - l->bench->limits.clock_ns;
        if (!r) {
            pcow_map_get_stats(map, &stats);
            l->bytes[side] = (double)stats.memory;
            pcow_map_destroy(map);
        }
    }
    if (!r) {
        series_add(&l->series[side], took, MAPS, 0);
    }
    pcow_close(image);
    bench_remove(l->bench, IMAGE);
    return r;
}

/* ---- trap-10k-snapshots -------------------------------------------------- */

/* The first store to one hot slab after each snapshot. */
static int time_traps(struct large *l, unsigned side, struct pcow_error *error)
{
    unsigned before = side == RAW ? 0 : l->bench->quick ? QUICK_MANY : MANY, got = 0;
    unsigned end = before + (side == RAW ? FEW : TRAPS);
    volatile uint8_t *memory;
    pcow_image *image = NULL;
    double took[TRAPS];
    pcow_map *map = NULL;
    int r = 0;

    while (got < TRAPS && !r) {                /* the few need an image again and again */
        r = create_image(l, IMAGE, HOT_SIZE, PCOW_PAGE_SIZE, &image, error);
        r = r ? r : pcow_map_create(image, NULL, &map, error);
        memory = r ? NULL : pcow_map_address(map);
        if (memory) {
            store_to_slabs(pcow_map_address(map), HOT_SIZE, 1, PCOW_SLAB_SIZE, 1);
        }
        for (unsigned i = 0; i < end && got < TRAPS && !r; i++) {
            uint64_t start;

            r = new_snapshot(image, i, error);
            start = now_ns();
            if (!r) {
                memory[i * UINT64_C(167) % 512 * PCOW_PAGE_SIZE] = (uint8_t)i;
            }
            if (i >= before) {
                took[got++] = (double)(now_ns() - start) - l->bench->limits.clock_ns;
            }
        }
        pcow_map_destroy(map);
        pcow_close(image);
        map = NULL;
        image = NULL;
        bench_remove(l->bench, IMAGE);
    }
    if (!r) {
        series_add(&l->series[side], took, TRAPS, 0);
    }
    return r;
}

/* ---- rebase-16k-pages ---------------------------------------------------- */

/* Pages of the base that lie far apart in 1 TiB, and are all the image has of it afterwards. */
static int make_base(const struct large *l, unsigned pages, struct pcow_error *error)
{
    uint64_t page[PCOW_PAGE_SIZE / sizeof(uint64_t)] = {1}, size = 1024 * GIB;
    pcow_image *image = NULL;
    int r = create_image(l, IMAGE, size, PCOW_PAGE_SIZE, &image, error);

    for (unsigned i = 0; i < pages && !r; i++) {
        page[0] = i + 1;
        r = pcow_write(image, size / pages / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE * i, page,
                       sizeof(page), error);
    }
    r = r ? r : pcow_seal(image, error);
    pcow_close(image);
    return r;
}

static int time_rebase(struct large *l, unsigned side, struct pcow_error *error)
{
    unsigned most = l->bench->quick ? QUICK_REBASE_PAGES : REBASE_PAGES;
    unsigned pages = side == RAW ? most / 4 : most;
    struct pcow_create_options options = {.base = IMAGE, .cluster_size = PCOW_PAGE_SIZE,
                                           .no_mirror = l->bench->no_mirror};
    char path[4096], base[4096];
    pcow_image *image = NULL;
    uint64_t start;
    double took;
    int r = make_base(l, pages, error);

    bench_path(l->bench, OVERLAY, path);
    options.base = bench_path(l->bench, IMAGE, base);
    r = r ? r : pcow_create(path, &options, error);
    r = r ? r : pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, error);
    start = now_ns();
    r = r ? r : pcow_rebase(image, NULL, NULL, false, NULL, NULL, error);
    took = (double)(now_ns() - start) / pages;
    if (!r) {
        series_add(&l->series[side], &took, 1, 0);
    }
    pcow_close(image);
    bench_remove(l->bench, OVERLAY);
    bench_remove(l->bench, IMAGE);
    return r;
}

/* ---- rows ---------------------------------------------------------------- */

static const struct plan {
    const char *name;
    int (*time)(struct large *l, unsigned side, struct pcow_error *error);
    bool huge;                                 /* files that are mapped with huge pages */
    bool is_snapshot;
} plans[] = {
    {.name = "create-16t", .time = time_create, .huge = true, .is_snapshot = true},
    {.name = "map-16t", .time = time_map},
    {.name = "trap-10k-snapshots", .time = time_traps},
    {.name = "rebase-16k-pages", .time = time_rebase},
};

static int add_row(const struct large *l, const struct plan *plan, struct pcow_error *error)
{
    struct row *row = bench_add_row(l->bench, plan->name, 1, engine_name(PCOW_ENGINE_SIGNAL));

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&l->series[RAW]);
    row->raw_p99_ns = series_p99(&l->series[RAW]);
    row->pcow_ns = series_value(&l->series[PCOW]);
    row->pcow_p99_ns = series_p99(&l->series[PCOW]);
    if (plan->time == time_map) {
        /* The kernel's own tables are another matter: slabs that lie far apart share none. */
        row_add_criterion(row, "monitor's memory, of 16 GiB's", l->bytes[PCOW] / l->bytes[RAW],
                          AT_MOST);
        row_add_detail(row, "monitor_bytes", l->bytes[PCOW]);
        row_add_detail(row, "monitor_bytes_16g", l->bytes[RAW]);
        return 0;
    }
    row_add_criterion(row, "pcow/raw", row->pcow_ns / row->raw_ns, AT_MOST);
    if (plan->is_snapshot) {
        row_add_criterion(row, "ns", row->pcow_ns, AT_MOST_NS);
        row_add_criterion(row, "us of 16 GiB", row->raw_ns / 1000, AT_MOST_NS / 1000);
    }
    return 0;
}

static int run_plan(struct bench *bench, const struct plan *plan, struct pcow_error *error)
{
    struct large *l = calloc(1, sizeof(*l));
    int r = l ? bench_need(bench, SLACK, error) : fail(error, -ENOMEM, "out of memory");

    if (l) {
        l->bench = bench;
    }
    for (unsigned i = 0; l && i < bench->repeat && !r; i++) {
        for (unsigned side = 0; side < SIDES && !r; side++) {
            r = plan->time(l, side, error);
        }
    }
    r = r ? r : add_row(l, plan, error);
    free(l);
    return r;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    int r = 0;

    for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]) && !r; i++) {
        bool entered = false;

        if (!bench_wants(bench, plans[i].name)) {
            continue;
        }
        /* Where no such pool can be had, as on fsdax, in the pool itself */
        entered = plans[i].huge && huge_pool_enter(bench);
        r = run_plan(bench, &plans[i], error);
        if (entered) {
            huge_pool_leave(bench);
        }
    }
    return r;
}

static const char *const names[] = {"create-16t", "map-16t", "trap-10k-snapshots",
                                    "rebase-16k-pages", NULL};

const struct group large_group = {names, run};
