/* SPDX-License-Identifier: BSD-3-Clause */
#include "soak.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "interrupt.h"
#include "report.h"
#include "sample.h"
#include "sides.h"
#include "soak_threads.h"

#define BASE "soak-base.pcow"
#define TOP "soak.pcow"
#define MAX_SAVED 4u
#define MAX_OPERATIONS 4096u                   /* of each thread in a burst */
/* mappings: so few that slabs have to be made whole */
#define SMALL_BUDGET_PER_SLAB 3u
#define SLACK (UINT64_C(512) << 20)

/* A snapshot and what it must hold. */
struct saved {
    char name[32];
    uint8_t *content;                          /* NULL: a free place */
};

struct soak {
    struct bench *bench;
    struct soak_report *report;
    uint64_t size, seed, names;
    char base[4096], top[4096];
    uint8_t *model;                            /* what the active layer must read as */
    /* the first: before any store; it stays, for much is absent again after a revert to it */
    struct saved saved[MAX_SAVED];
    uint8_t *buffer;                           /* of one slab */
    pcow_image *image;
    pcow_map *map;
    enum pcow_engine engine;
    uint64_t mapped_since;
    struct soak_burst burst;
};

static uint64_t seconds_now(void)
{
    return now_ns() / 1000000000;
}

static uint64_t random_below(struct soak *s, uint64_t limit)
{
    return random_next(&s->seed) % limit;
}

/* Two of three slabs hold data in the base; the others are expanded at the first store. */
static int build(struct soak *s, struct pcow_error *error)
{
    struct pcow_create_options options = {.virtual_size = s->size}, on_base = {.base = s->base};
    pcow_image *image = NULL;
    int r = pcow_create(s->base, &options, error);

    r = r ? r : pcow_open(s->base, PCOW_OPEN_WRITE, NULL, &image, error);
    for (uint64_t slab = 0; slab < s->size / PCOW_SLAB_SIZE && !r; slab++) {
        if (slab % 3) {
            fill_slab((uint64_t *)s->buffer, slab * (PCOW_SLAB_SIZE / PCOW_PAGE_SIZE));
            memcpy(s->model + slab * PCOW_SLAB_SIZE, s->buffer, PCOW_SLAB_SIZE);
            r = pcow_write(image, slab * PCOW_SLAB_SIZE, s->buffer, PCOW_SLAB_SIZE, error);
        }
    }
    r = r ? r : pcow_flush(image, error);
    r = r ? r : pcow_seal(image, error);
    pcow_close(image);
    return r ? r : pcow_create(s->top, &on_base, error);
}

static int map_image(struct soak *s, struct pcow_error *error)
{
    bool small = random_below(s, 2);
    struct pcow_map_options options = {
        .engine = s->engine,
        .full_policy = PCOW_FULL_FAIL,
        .vma_budget = small ? (unsigned)(s->size / PCOW_SLAB_SIZE * SMALL_BUDGET_PER_SLAB) : 0};
    int r = pcow_open(s->top, PCOW_OPEN_WRITE, NULL, &s->image, error);

    r = r ? r : pcow_map_create(s->image, &options, &s->map, error);
    s->burst.map = s->map;
    s->burst.memory = r ? NULL : pcow_map_address(s->map);
    s->mapped_since = seconds_now();
    return r;
}

static uint64_t *seconds_with(struct soak_report *report, enum pcow_engine engine)
{
    switch (engine) {
    case PCOW_ENGINE_MINOR: return &report->minor_seconds;
    case PCOW_ENGINE_KVM: return &report->kvm_seconds;
    default: return &report->signal_seconds;
    }
}

static void unmap_image(struct soak *s)
{
    struct pcow_map_stats stats;
    uint64_t seconds = seconds_now() - s->mapped_since;

    if (s->map) {
        pcow_map_get_stats(s->map, &stats);
        s->report->traps += stats.write_traps + stats.read_traps;
        s->report->pages_copied += stats.pages_copied;
        s->report->pages_zeroed += stats.pages_zeroed;
        s->report->slabs_promoted += stats.slabs_promoted;
        *seconds_with(s->report, stats.engine) += seconds;
    }
    pcow_map_destroy(s->map);
    pcow_close(s->image);
    s->map = NULL;
    s->image = NULL;
}

static int verify_memory(struct soak *s, struct pcow_error *error)
{
    for (uint64_t at = 0; at < s->size; at += PCOW_PAGE_SIZE) {
        if (memcmp(s->burst.memory + at, s->model + at, PCOW_PAGE_SIZE)) {
            return fail(error, -EILSEQ, "soak: page at offset %llu is wrong",
                        (unsigned long long)at);
        }
    }
    s->report->verifications++;
    s->report->verified_bytes += s->size;
    return 0;
}

/* As tools read it: without a map.  snapshot: NULL for the active layer. */
static int verify_file(struct soak *s, const char *snapshot, const uint8_t *content,
                       struct pcow_error *error)
{
    pcow_image *image = NULL;
    int r = pcow_open(s->top, 0, snapshot, &image, error);

    for (uint64_t at = 0; at < s->size && !r; at += PCOW_SLAB_SIZE) {
        r = pcow_read(image, at, s->buffer, PCOW_SLAB_SIZE, error);
        if (!r && memcmp(s->buffer, content + at, PCOW_SLAB_SIZE)) {
            r = fail(error, -EILSEQ, "soak: %s is wrong in the 2 MiB at offset %llu",
                     snapshot ? snapshot : "the active layer", (unsigned long long)at);
        }
    }
    pcow_close(image);
    s->report->verifications++;
    s->report->verified_bytes += s->size;
    return r;
}

static void first_finding(void *opaque, enum pcow_finding_kind kind, const char *message)
{
    char *text = opaque;

    if (kind != PCOW_FINDING_NOTE && !text[0]) {
        snprintf(text, 256, "%s", message);
    }
}

static int check_file(struct soak *s, struct pcow_error *error)
{
    struct pcow_check_result result;
    char finding[256] = "";
    int r = pcow_check(s->top, 0, first_finding, finding, &result, error);

    s->report->checks++;
    if (!r) {
        s->report->slabs = result.slabs;
        s->report->slabs_used = result.slabs_used;
        s->report->leaks = result.leaks > s->report->leaks ? result.leaks : s->report->leaks;
    }
    return r || !result.corruptions
               ? r
               : fail(error, -EBADMSG, "soak: the check finds %llu corruptions, the first: %s",
                      (unsigned long long)result.corruptions, finding);
}

static struct saved *free_place(struct soak *s)
{
    for (unsigned i = 0; i < MAX_SAVED; i++) {
        if (!s->saved[i].content) {
            return &s->saved[i];
        }
    }
    return NULL;
}

/* One of those from this place on. */
static struct saved *any_saved(struct soak *s, unsigned first)
{
    unsigned count = MAX_SAVED - first, skip = (unsigned)random_below(s, count);

    for (unsigned i = 0; i < count; i++) {
        struct saved *saved = &s->saved[first + (skip + i) % count];

        if (saved->content) {
            return saved;
        }
    }
    return NULL;
}

static int create(struct soak *s, struct saved *place, struct pcow_error *error)
{
    place->content = malloc(s->size);
    if (!place->content) {
        return fail(error, -ENOMEM, "out of memory");
    }
    memcpy(place->content, s->model, s->size);
    snprintf(place->name, sizeof(place->name), "s%llu", (unsigned long long)++s->names);
    s->report->snapshots++;
    return pcow_snapshot_create(s->image, place->name, error);
}

static int delete(struct soak *s, struct saved *saved, struct pcow_error *error)
{
    free(saved->content);
    saved->content = NULL;
    s->report->deletions++;
    return pcow_snapshot_delete(s->image, saved->name, NULL, error);
}

static int revert(struct soak *s, const struct saved *saved, struct pcow_error *error)
{
    memcpy(s->model, saved->content, s->size);
    s->report->reverts++;
    return pcow_snapshot_revert(s->image, saved->name, error);
}

/*
 * Without vCPUs the engine kvm needs no KVM: its traps are those of signal, but what it copies and
 * maps is chosen otherwise.
 */
static enum pcow_engine next_engine(const struct soak *s)
{
    switch (s->engine) {
    case PCOW_ENGINE_SIGNAL: return s->bench->minor_problem ? PCOW_ENGINE_KVM : PCOW_ENGINE_MINOR;
    case PCOW_ENGINE_MINOR: return PCOW_ENGINE_KVM;
    default: return PCOW_ENGINE_SIGNAL;
    }
}

/* Close, look at everything from outside, and open with the next engine. */
static int reopen(struct soak *s, struct pcow_error *error)
{
    int r;

    unmap_image(s);
    r = check_file(s, error);
    r = r ? r : verify_file(s, NULL, s->model, error);
    for (unsigned i = 0; i < MAX_SAVED && !r; i++) {
        r = s->saved[i].content ? verify_file(s, s->saved[i].name, s->saved[i].content, error) : 0;
    }
    s->engine = next_engine(s);
    s->report->reopened++;
    return r ? r : map_image(s, error);
}

/* What happens between two bursts, when no thread stores. */
static int between(struct soak *s, struct pcow_error *error)
{
    unsigned kind = (unsigned)random_below(s, 100);
    struct saved *place = free_place(s), *saved;

    if (kind < 20 && place) {
        return create(s, place, error);
    }
    if (kind < 30) {
        int r = revert(s, any_saved(s, 0), error);

        return r ? r : verify_memory(s, error);
    }
    saved = any_saved(s, 1);
    if (kind < 45 && saved) {
        return delete(s, saved, error);
    }
    return kind < 55   ? verify_memory(s, error)
           : kind < 60 ? reopen(s, error)
                       : bench_need(s->bench, 0, error);
}

static int make_source(struct soak *s, uint8_t **bytes, struct pcow_error *error)
{
    s->burst.source = memfd_create("pcow-soak", MFD_CLOEXEC);
    *bytes = malloc(SOAK_SOURCE_SIZE);
    if (s->burst.source < 0 || !*bytes) {
        return fail(error, -ENOMEM, "out of memory");
    }
    for (uint64_t at = 0; at < SOAK_SOURCE_SIZE; at += sizeof(uint64_t)) {
        uint64_t word = random_next(&s->seed);

        memcpy(*bytes + at, &word, sizeof(word));
    }
    s->burst.source_bytes = *bytes;
    return pwrite(s->burst.source, *bytes, SOAK_SOURCE_SIZE, 0) == (ssize_t)SOAK_SOURCE_SIZE ? 0
         : fail(error, -EIO, "cannot write to memory");
}

static int go_on(struct soak *s, unsigned seconds, struct pcow_error *error)
{
    uint64_t begun = seconds_now();
    int r = 0;

    while (!r && seconds_now() - begun < seconds && !interrupt_pending()) {
        s->burst.seed = random_next(&s->seed);
        s->burst.operations = 1 + (unsigned)random_below(s, MAX_OPERATIONS);
        r = soak_run_burst(&s->burst, s->report, error);
        s->report->bursts++;
        r = r ? r : between(s, error);
    }
    /* At the end all of it once more. */
    r = r ? r : verify_memory(s, error);
    r = r ? r : reopen(s, error);
    s->report->seconds = seconds_now() - begun;
    return r;
}

int soak(struct bench *bench, unsigned seconds, unsigned threads, uint64_t seed,
         struct soak_report *report, struct pcow_error *error)
{
    struct soak s = {.bench = bench,
                     .report = report,
                     .size = bench->size,
                     .seed = seed ? seed : now_ns() | 1,
                     .engine = PCOW_ENGINE_SIGNAL,
                     .burst = {.source = -1}};
    uint8_t *source = NULL;
    int r = bench_need(bench, (2 * MAX_SAVED + 3) * bench->size + SLACK, error);

    *report = (struct soak_report){.threads = threads, .size = s.size, .seed = s.seed};
    bench_path(bench, BASE, s.base);
    bench_path(bench, TOP, s.top);
    s.model = calloc(1, s.size);
    s.buffer = (uint8_t *)slab_buffer();
    s.burst.size = s.size;
    s.burst.threads = threads;
    s.burst.model = s.model;
    r = r || (s.model && s.buffer) ? r : fail(error, -ENOMEM, "out of memory");
    r = r ? r : make_source(&s, &source, error);
    r = r ? r : build(&s, error);
    r = r ? r : map_image(&s, error);
    r = r ? r : create(&s, &s.saved[0], error);
    r = r ? r : go_on(&s, seconds, error);
    unmap_image(&s);
    if (s.burst.source >= 0) {
        close(s.burst.source);
    }
    for (unsigned i = 0; i < MAX_SAVED; i++) {
        free(s.saved[i].content);
    }
    free(s.model);
    free(s.buffer);
    free(source);
    return r;
}
