/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Random operations against a plain model: the guest's bytes, and a copy of them for every
 * snapshot. After every step the image must be clean for pcow_check(), and reads must agree;
 * reopening must change nothing.
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SIZE (8 * MIB)
#define MAX_SNAPSHOTS 12
#define MAX_FILES 6

struct saved {
    char name[32];
    uint64_t size;
    unsigned char *bytes;
};

struct world {
    uint64_t seed;
    unsigned files, next_name;
    char path[512];
    pcow_image *image;
    pcow_map *map;
    enum pcow_engine engine;
    uint64_t size;
    unsigned char *bytes;
    struct saved saved[MAX_SNAPSHOTS];
    unsigned snapshots;
    const char *doing;
};

static uint64_t below(struct world *w, uint64_t limit)
{
    return random_next(&w->seed) % limit;
}

static void unmap(struct world *w)
{
    pcow_map_destroy(w->map);
    w->map = NULL;
}

static void check_all(struct world *w)
{
    if (w->map && memcmp(pcow_map_address(w->map), w->bytes, w->size))
        for (uint64_t i = 0; i < w->size; i++)
            if (((unsigned char *)pcow_map_address(w->map))[i] != w->bytes[i])
                fail_msg("after %s: mapped byte %llu differs", w->doing, (unsigned long long)i);
    assert_int_equal(pcow_size(w->image), w->size);
    assert_reads(w->image, 0, w->bytes, w->size);
}

static void reopen(struct world *w)
{
    unmap(w);
    pcow_close(w->image);
    must_be_clean(w->path);
    w->image = must_open(w->path, PCOW_OPEN_WRITE);
}

static void do_write(struct world *w)
{
    uint64_t offset = below(w, w->size), length = 1 + below(w, below(w, 4) ? 9000 : 600 * KIB);
    unsigned char *data;

    if (length > w->size - offset)
        length = w->size - offset;
    data = malloc(length);
    assert_non_null(data);
    fill_pattern(data, length, &w->seed);
    memcpy(w->bytes + offset, data, length);
    if (w->map)
        memcpy((unsigned char *)pcow_map_address(w->map) + offset, data, length);
    else
        MUST(pcow_write(w->image, offset, data, length, &error));
    free(data);
}

static void do_zero(struct world *w)
{
    uint64_t offset = below(w, w->size), length = 1 + below(w, 300 * KIB);

    if (length > w->size - offset)
        length = w->size - offset;
    memset(w->bytes + offset, 0, length);
    if (w->map)
        memset((unsigned char *)pcow_map_address(w->map) + offset, 0, length);
    else
        MUST(pcow_write_zeroes(w->image, offset, length, &error));
}

static void do_snapshot(struct world *w)
{
    struct saved *saved = &w->saved[w->snapshots];

    if (w->snapshots == MAX_SNAPSHOTS)
        return;
    snprintf(saved->name, sizeof saved->name, "s%u", w->next_name++);
    saved->size = w->size;
    saved->bytes = malloc(w->size);
    assert_non_null(saved->bytes);
    memcpy(saved->bytes, w->bytes, w->size);
    MUST(pcow_snapshot_create(w->image, saved->name, &error));
    w->snapshots++;
    MUST_FAIL(-EEXIST, pcow_snapshot_create(w->image, saved->name, &error));
}

static void do_revert(struct world *w)
{
    struct saved *saved;

    if (!w->snapshots)
        return;
    saved = &w->saved[below(w, w->snapshots)];
    if (w->map && saved->size != w->size) {
        MUST_FAIL(-EBUSY, pcow_snapshot_revert(w->image, saved->name, &error));
        unmap(w);
    }
    MUST(pcow_snapshot_revert(w->image, saved->name, &error));
    w->size = saved->size;
    memcpy(w->bytes, saved->bytes, saved->size);
}

static void do_delete(struct world *w)
{
    unsigned at;

    if (!w->snapshots)
        return;
    at = (unsigned)below(w, w->snapshots);
    MUST(pcow_snapshot_delete(w->image, w->saved[at].name, NULL, &error));
    MUST_FAIL(-ENOENT, pcow_snapshot_revert(w->image, w->saved[at].name, &error));
    free(w->saved[at].bytes);
    w->saved[at] = w->saved[--w->snapshots];
}

static void do_rename(struct world *w)
{
    struct saved *saved;
    char name[32];

    if (!w->snapshots)
        return;
    saved = &w->saved[below(w, w->snapshots)];
    snprintf(name, sizeof name, "r%u", w->next_name++);
    MUST(pcow_snapshot_rename(w->image, saved->name, name, &error));
    strcpy(saved->name, name);
}

static void do_resize(struct world *w)
{
    uint64_t size = (1 + below(w, MAX_SIZE / PCOW_SLAB_SIZE)) * PCOW_SLAB_SIZE;

    if (w->map) {
        if (size != w->size)
            MUST_FAIL(-EBUSY, pcow_resize(w->image, size, true, &error));
        return;
    }
    MUST(pcow_resize(w->image, size, true, &error));
    if (size > w->size)
        memset(w->bytes + w->size, 0, size - w->size);
    w->size = size;
}

static void do_map(struct world *w)
{
    struct pcow_map_options options = {
        .engine = w->engine, .serves_sigbus = serve_bus(), .vma_budget = below(w, 3) ? 0 : 12};

    if (w->map)
        unmap(w);
    else
        MUST(pcow_map_create(w->image, &options, &w->map, &error));
}

static void verify_snapshots(struct world *w)
{
    for (unsigned i = 0; i < w->snapshots; i++) {
        pcow_image *view;

        MUST(pcow_open(w->path, PCOW_OPEN_FORCE_SHARE, w->saved[i].name, &view, &error));
        assert_int_equal(pcow_size(view), w->saved[i].size);
        assert_reads(view, 0, w->saved[i].bytes, w->saved[i].size);
        pcow_close(view);
    }
}

/* The image becomes the base of a new one; its snapshots stay behind in it. */
static void do_overlay(struct world *w)
{
    char path[512];

    if (w->files == MAX_FILES)
        return;
    unmap(w);
    verify_snapshots(w);
    pcow_close(w->image);
    for (unsigned i = 0; i < w->snapshots; i++)
        free(w->saved[i].bytes);
    w->snapshots = 0;
    snprintf(path, sizeof path, "%s/f%u.pcow", scratch_directory(), w->files++);
    w->image = must_create(path, 0, below(w, 2) ? 64 * KIB : 4 * KIB, w->path);
    strcpy(w->path, path);
}

/* Leave the base, or merge into it. */
static void do_flatten(struct world *w)
{
    struct pcow_info info;

    unmap(w);
    while (w->snapshots) {
        MUST(pcow_snapshot_delete(w->image, w->saved[--w->snapshots].name, NULL, &error));
        free(w->saved[w->snapshots].bytes);
    }
    pcow_get_info(w->image, &info);
    if (info.has_base && below(w, 2))
        MUST(pcow_commit(w->image, NULL, NULL, &error));
    else
        MUST(pcow_rebase(w->image, NULL, NULL, false, NULL, NULL, &error));
}

static const struct {
    const char *name;
    unsigned weight;
    void (*run)(struct world *);
} operations[] = {
    {"write", 50, do_write},    {"zero", 6, do_zero},       {"snapshot", 6, do_snapshot},
    {"revert", 4, do_revert},   {"delete", 4, do_delete},   {"rename", 1, do_rename},
    {"resize", 2, do_resize},   {"map", 6, do_map},         {"reopen", 3, reopen},
    {"overlay", 1, do_overlay}, {"flatten", 1, do_flatten},
};

static void step(struct world *w)
{
    unsigned total = 0, pick;

    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++)
        total += operations[i].weight;
    pick = (unsigned)below(w, total);
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        if (pick < operations[i].weight) {
            w->doing = operations[i].name;
            operations[i].run(w);
            return;
        }
        pick -= operations[i].weight;
    }
}

static void run_model(enum pcow_engine engine)
{
    struct world w = {.seed = random_seed(), .size = 6 * MIB, .engine = engine, .files = 1};
    unsigned steps = test_steps(2000);

    print_message("seed %#llx, %u steps\n", (unsigned long long)w.seed, steps);
    w.bytes = calloc(1, MAX_SIZE);
    assert_non_null(w.bytes);
    snprintf(w.path, sizeof w.path, "%s", scratch("f0.pcow"));
    w.image = must_create(w.path, w.size, 16 * KIB, NULL);
    for (unsigned i = 0; i < steps; i++) {
        struct pcow_check_result result;

        step(&w);
        MUST(pcow_check(w.path, PCOW_CHECK_FORCE_SHARE, NULL, NULL, &result, &error));
        /* What a mapped image has prepared has blocks and no owner yet. */
        if (result.corruptions || (result.leaks && !w.map))
            fail_msg("step %u (%s): check finds %llu corruptions, %llu leaks", i, w.doing,
                     (unsigned long long)result.corruptions, (unsigned long long)result.leaks);
        if (i % 8 == 0)
            check_all(&w);
        if (i % 64 == 0)
            verify_snapshots(&w);
    }
    reopen(&w);
    check_all(&w);
    verify_snapshots(&w);
    pcow_close(w.image);
    for (unsigned i = 0; i < w.snapshots; i++)
        free(w.saved[i].bytes);
    free(w.bytes);
}

static void test_model_signal(void **state)
{
    (void)state;
    run_model(PCOW_ENGINE_SIGNAL);
}

static void test_model_minor(void **state)
{
    (void)state;
    run_model(PCOW_ENGINE_MINOR);
}

/* Without vCPUs: its traps are those of signal, but what it copies and maps is chosen otherwise. */
static void test_model_kvm(void **state)
{
    (void)state;
    run_model(PCOW_ENGINE_KVM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_model_signal, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_model_minor, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_model_kvm, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
