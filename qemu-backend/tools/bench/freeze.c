/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A live snapshot of a large image whose every page is mapped for stores: with 2 MiB pages, and
 * with entries of 4 KiB; written in order, so that it is one mapping, or in random order, so that
 * each slab is one. What takes time is the write protection; raw is mprotect() of as many pages in
 * one linear mapping of the same file.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "huge.h"
#include "machine.h"
#include "report.h"
#include "sample.h"
#include "sides.h"
#include "size.h"

#define FILE_NAME "freeze.pcow"
#define SNAPSHOT "frozen"
#define SIZE (UINT64_C(16) << 30)
#define QUICK_SIZE (UINT64_C(64) << 20)
#define MIN_SIZE (UINT64_C(64) << 20)
#define LEAVE_FREE (UINT64_C(3) << 30)         /* memory that is not ours to take */
#define ROUNDS 5u
#define SEED UINT64_C(0x66726565)
#define FULL_SHARE 0.999
#define AT_MOST_NS_HUGE 1e6
#define AT_MOST_NS_PER_PAGE 30

struct freeze_row {
    struct bench *bench;
    const char *name;
    bool huge, scattered, fragmented;
    uint64_t size;
    struct series raw, pcow, raw_touch, pcow_touch;
    double huge_share, huge_share_after;       /* the second: when all was loaded from again */
    unsigned vmas;
    char path[4096];
};

static uint64_t choose_size(const struct bench *bench)
{
    uint64_t size = bench->quick ? QUICK_SIZE : SIZE;

    while (size > MIN_SIZE && bench->persistence == PCOW_PERSISTENCE_VOLATILE
           && memory_available() < size + LEAVE_FREE) {
        size /= 2;
    }
    return size;
}

/*
 * The first word of a page; a store by a copy of itself maps it for stores and changes nothing. To
 * touched: the time for a page.
 */
static void touch(uint8_t *memory, uint64_t size, struct series *touched)
{
    uint64_t start = now_ns();
    double ns;

    for (uint64_t offset = 0; offset < size; offset += PCOW_PAGE_SIZE) {
        volatile uint64_t *word = (volatile uint64_t *)(memory + offset);

        *word = *word;
    }
    ns = (double)(now_ns() - start) / (double)(size / PCOW_PAGE_SIZE);
    series_add_value(touched, ns, ns);
}

static int build(const struct freeze_row *f, struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = f->size,
                                           .no_mirror = f->bench->no_mirror};
    uint64_t slabs = f->size / PCOW_SLAB_SIZE, seed = SEED;
    uint64_t *buffer = slab_buffer(), *order = calloc(slabs, sizeof(*order));
    pcow_image *image = NULL;
    int r = buffer && order ? pcow_create(f->path, &options, error)
                            : fail(error, -ENOMEM, "out of memory");

    for (uint64_t i = 0; i < slabs && !r; i++) {
        order[i] = i;
    }
    if (f->scattered && !r) {
        shuffle(order, slabs, &seed);
    }
    r = r ? r : pcow_open(f->path, PCOW_OPEN_WRITE, NULL, &image, error);
    for (uint64_t i = 0; i < slabs && !r; i++) {
        fill_slab(buffer, order[i] * (PCOW_SLAB_SIZE / PCOW_PAGE_SIZE));
        r = bench_need(f->bench, 0, error);
        r = r ? r : pcow_write(image, order[i] * PCOW_SLAB_SIZE, buffer, PCOW_SLAB_SIZE, error);
    }
    r = r ? r : pcow_flush(image, error);
    pcow_close(image);
    free(order);
    free(buffer);
    return r;
}

static int time_raw(struct freeze_row *f, double *ns, struct pcow_error *error)
{
    int fd = open(f->path, O_RDWR | O_CLOEXEC), r = 0;
    void *reservation = NULL;
    uint8_t *memory = reserve_aligned(f->size, &reservation);
    uint64_t start;

    /* The first bytes of the file are its header; there are more of them than the virtual size. */
    if (fd < 0 || !memory
        || mmap(memory, f->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
               == MAP_FAILED) {
        r = fail(error, -errno, "cannot map %s: %s", f->path, strerror(errno));
    }
    if (!r) {
        touch(memory, f->size, &f->raw_touch);
        start = now_ns();
        r = mprotect(memory, f->size, PROT_READ)
                ? fail(error, -errno, "cannot protect memory: %s", strerror(errno))
                : 0;
        *ns = (double)(now_ns() - start) - f->bench->limits.clock_ns;
    }
    release_aligned(reservation, f->size);
    if (fd >= 0) {
        close(fd);
    }
    return r;
}

static int verify(const struct freeze_row *f, const uint8_t *memory, struct pcow_error *error)
{
    for (uint64_t page = 0; page < f->size / PCOW_PAGE_SIZE; page++) {
        const uint64_t *words = (const uint64_t *)(memory + page * PCOW_PAGE_SIZE);

        if (words[0] != page_pattern(page)
            || words[PCOW_PAGE_SIZE / sizeof(*words) - 1] != page_pattern(page)) {
            return fail(error, -EILSEQ, "%s: wrong data at offset %llu after the freeze", f->name,
                        (unsigned long long)(page * PCOW_PAGE_SIZE));
        }
    }
    return 0;
}

static int time_pcow(struct freeze_row *f, double *ns, bool check, struct pcow_error *error)
{
    pcow_image *image = NULL;
    pcow_map *map = NULL;
    struct pcow_map_stats stats;
    uint64_t start;
    int r = pcow_open(f->path, PCOW_OPEN_WRITE, NULL, &image, error);

    r = r ? r : pcow_map_create(image, NULL, &map, error);
    if (!r) {
        touch(pcow_map_address(map), f->size, &f->pcow_touch);
        f->huge_share = huge_share(pcow_map_address(map), f->size);
        start = now_ns();
        r = pcow_snapshot_create(image, SNAPSHOT, error);
        *ns = (double)(now_ns() - start) - f->bench->limits.clock_ns;
        f->vmas = count_mappings(pcow_map_address(map), f->size);
        pcow_map_get_stats(map, &stats);
        if (!r && stats.pages_copied) {
            r = fail(error, -EPROTO,
                     "%s: the layer did not own its pages; this row would not measure what it says",
                     f->name);
        }
        r = r || !check ? r : verify(f, pcow_map_address(map), error);
        f->huge_share_after =
            check ? huge_share(pcow_map_address(map), f->size) : f->huge_share_after;
    }
    pcow_map_destroy(map);
    /* The pages are the active layer's again. */
    r = r ? r : pcow_snapshot_delete(image, SNAPSHOT, NULL, error);
    pcow_close(image);
    return r;
}

static int add_row(const struct freeze_row *f, struct pcow_error *error)
{
    struct row *row = bench_add_row(f->bench, f->name, 1, engine_name(PCOW_ENGINE_SIGNAL));
    double pages = (double)(f->size / PCOW_PAGE_SIZE);
    char size[SIZE_TEXT_LENGTH];

    if (!row) {
        return fail(error, -ENOMEM, "out of memory");
    }
    row->raw_ns = series_value(&f->raw);
    row->raw_p99_ns = series_p99(&f->raw);
    row->limit_ns = row->raw_ns;
    row->pcow_ns = series_value(&f->pcow);
    row->pcow_p99_ns = series_p99(&f->pcow);
    if (!f->huge) {
        row_add_criterion(row, "ns/page", row->pcow_ns / pages, AT_MOST_NS_PER_PAGE);
    } else if (f->size == SIZE || f->bench->quick) {
        row_add_criterion(row, "ns", row->pcow_ns, AT_MOST_NS_HUGE);
    } else {
        row_add_criterion(row, "ns for 16 GiB, from this size",
                          row->pcow_ns * (double)SIZE / (double)f->size, AT_MOST_NS_HUGE);
    }
    row_add_detail(row, "mapped_bytes", (double)f->size);
    row_add_detail(row, "ns_per_page", row->pcow_ns / pages);
    row_add_detail(row, "touch_ns_per_page", series_value(&f->pcow_touch));
    row_add_detail(row, "raw_touch_ns_per_page", series_value(&f->raw_touch));
    row_add_detail(row, "huge_share", f->huge_share);
    row_add_detail(row, "huge_share_after", f->huge_share_after);
    row_add_detail(row, "vmas", f->vmas);
    if (f->size != SIZE) {
        snprintf(row->note, sizeof(row->note), "measured with %s: that is what %s",
                 format_size(f->size, size),
                 f->fragmented     ? "the kernel had 2 MiB pages for"
                 : f->bench->quick ? "--quick takes"
                                   : "memory was free for");
    }
    return 0;
}

/* The file; half as large as long as the kernel has too few huge pages in one piece for it. */
static int build_mappable(struct freeze_row *f, struct pcow_error *error)
{
    int r = bench_need(f->bench, f->size + f->size / 8, error);
    double unused;

    r = r ? r : build(f, error);
    while (!r && f->huge && f->size / 2 >= MIN_SIZE) {
        r = time_pcow(f, &unused, false, error);
        if (r || f->huge_share >= FULL_SHARE) {
            break;
        }
        f->size /= 2;
        f->fragmented = true;
        bench_remove(f->bench, FILE_NAME);
        r = build(f, error);
    }
    return r;
}

static int run_row(struct bench *bench, const char *name, bool huge, bool scattered,
                   struct pcow_error *error)
{
    struct freeze_row *f = calloc(1, sizeof(*f));
    int r = 0;

    if (!f) {
        return fail(error, -ENOMEM, "out of memory");
    }
    *f = (struct freeze_row){.bench = bench,
                             .name = name,
                             .huge = huge,
                             .scattered = scattered,
                             .size = choose_size(bench)};
    bench_path(bench, FILE_NAME, f->path);
    r = build_mappable(f, error);
    for (unsigned round = 0; round < (bench->quick ? 1 : ROUNDS) && !r; round++) {
        double raw = NAN, pcow = NAN;

        r = bench_need(bench, 0, error);
        r = r ? r : time_raw(f, &raw, error);
        r = r ? r : time_pcow(f, &pcow, round == 0, error);
        if (!r) {
            series_add_value(&f->raw, raw, raw);
            series_add_value(&f->pcow, pcow, pcow);
        }
    }
    r = r ? r : add_row(f, error);
    bench_remove(bench, FILE_NAME);
    free(f);
    return r;
}

static const char *const names[] = {"freeze-4k", "freeze-4k-scattered", "freeze-huge",
                                    "freeze-huge-scattered", NULL};

/* Of in order and scattered, what is wanted. */
static int run_rows(struct bench *bench, const char *const *rows, bool huge,
                    struct pcow_error *error)
{
    int r = 0;

    for (unsigned scattered = 0; scattered < 2 && !r; scattered++) {
        r = bench_wants(bench, rows[scattered])
                ? run_row(bench, rows[scattered], huge, scattered, error)
                : 0;
    }
    return r;
}

static int run(struct bench *bench, struct pcow_error *error)
{
    const char *const *huge = names + 2;
    int r = run_rows(bench, names, false, error);

    if (!r && (bench_wants(bench, huge[0]) || bench_wants(bench, huge[1]))
        && huge_pool_enter(bench)) {
        r = run_rows(bench, huge, true, error);
        huge_pool_leave(bench);
    }
    return r;
}

const struct group freeze_group = {names, run};
