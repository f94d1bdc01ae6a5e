/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A load of what is there neither waits nor fails for want of space, whatever the state of its
 * slab. Only stores do.
 */
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define SLABS 8u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define EACH 4u                        /* of so many pages one is the base's */
#define FEW_MAPPINGS 64u
#define MORE_FOR_HOLES 260u            /* see monitor/holes.c */

static int pool_setup(void **state)
{
    return pool_mount(state, "32m");
}

static unsigned char expected(unsigned page)
{
    return page % EACH ? 0 : (unsigned char)(page / EACH % 250 + 1);
}

static pcow_image *make_image(bool copy_on_read)
{
    struct pcow_create_options options = {.base = NULL, .copy_on_read = copy_on_read};
    char page[4096], base[600];
    pcow_image *image;

    snprintf(base, sizeof base, "%s", path_in_pool("base.pcow"));
    image = must_create(base, SIZE, 4096, NULL);
    for (unsigned i = 0; i < SLABS / 2 * PAGES_PER_SLAB; i += EACH) {
        memset(page, expected(i), sizeof page);
        MUST(pcow_write(image, i * UINT64_C(4096), page, sizeof page, &error));
    }
    pcow_close(image);
    options.base = base;
    MUST(pcow_create(path_in_pool("top.pcow"), &options, &error));
    return must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
}

static void must_load(const unsigned char *memory)
{
    for (unsigned i = 0; i < SLABS / 2 * PAGES_PER_SLAB; i++)
        if (memory[i * UINT64_C(4096) + i % 4096] != expected(i))
            fail_msg("page %u reads %u, not %u", i, memory[i * UINT64_C(4096) + i % 4096],
                     expected(i));
}

static void end(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path_in_pool("top.pcow"));
    unlink(path_in_pool("top.pcow"));
    unlink(path_in_pool("base.pcow"));
    unlink(path_in_pool("filler"));
    pool_resize("32m");
}

/* budget: of mappings; 0: as many as are needed. */
static void load_all(enum pcow_engine engine, unsigned budget, bool copy_on_read, bool asked)
{
    struct pcow_map_options options = {
        .engine = engine,
        .full_policy = PCOW_FULL_FAIL,
        .vma_budget = budget,
        .serves_sigbus = engine == PCOW_ENGINE_MINOR && serve_bus(),
    };
    pcow_image *image = make_image(copy_on_read);
    struct pcow_map_stats stats;
    unsigned char *memory;
    pcow_map *map;

    pool_fill();
    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
    /* Half of it, as a device would: the pages of the base, and what nothing holds. */
    if (asked)
        MUST(pcow_map_resolve(map, 0, SIZE, false, &error));
    must_load(memory);
    must_load(memory);
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.pool_full_waits, 0);
    if (budget)
        assert_true(stats.vmas <= budget);
    assert_int_equal(pcow_map_resolve(map, 4096, 1, true, NULL), -ENOSPC);
    must_load(memory);
    /* With space a store goes on; what was loaded without does not get in its way. */
    pool_resize("96m");
    for (unsigned slab = 0; slab < SLABS; slab++) {
        memory[slab * PCOW_SLAB_SIZE + 5 * 4096 + 1] = 0xee;
        assert_int_equal(memory[slab * PCOW_SLAB_SIZE + 5 * 4096 + 1], 0xee);
        assert_int_equal(memory[slab * PCOW_SLAB_SIZE + 5 * 4096], 0);
    }
    for (unsigned slab = 0; slab < SLABS; slab++)
        memory[slab * PCOW_SLAB_SIZE + 5 * 4096 + 1] = 0;
    must_load(memory);
    MUST(pcow_snapshot_create(image, "s", &error));
    must_load(memory);
    memory[3] = 7;
    MUST(pcow_snapshot_revert(image, "s", &error));
    must_load(memory);
    pcow_map_get_stats(map, &stats);
    assert_true(map->bounced <= SLABS);
    end(image, map);
}

static void test_cold_slabs(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned asked = 0; asked < 2; asked++)
            load_all(engine, 100, false, asked);
}

static void test_copy_on_read(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned asked = 0; asked < 2; asked++) {
            load_all(engine, 0, true, asked);
            load_all(engine, 100, true, asked);
        }
}

static void test_mapped_slabs(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned asked = 0; asked < 2; asked++)
            load_all(engine, 0, false, asked);
}

/* ---- pages that have no blocks --------------------------------------------------------------- */

/* As a copy of the file that leaves zeros out. */
/* So, and as zeros that were written. */
static void make_holes(void)
{
    static const char zeros[PCOW_SLAB_SIZE];
    const struct pcow_create_options options = {.base = path_in_pool("base.pcow")};
    pcow_image *image;

    pcow_close(must_create(options.base, SIZE, 4096, NULL));
    image = must_open(options.base, PCOW_OPEN_WRITE);
    MUST(pcow_write(image, 0, zeros, sizeof zeros, &error));
    MUST(pcow_write(image, 4096, "x", 1, &error));
    MUST(pcow_write(image, PCOW_SLAB_SIZE, "y", 1, &error));
    pcow_close(image);
    pool_make_sparse("base.pcow");
    MUST(pcow_create(path_in_pool("top.pcow"), &options, &error));
    image = must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
    MUST(pcow_write_zeroes(image, PCOW_SLAB_SIZE, 64 * KIB, &error));
    MUST(pcow_write(image, PCOW_SLAB_SIZE + 32 * KIB, "z", 1, &error));
    pcow_close(image);
}

static void must_load_holes(const volatile unsigned char *memory)
{
    for (uint64_t at = 0; at < 2 * PCOW_SLAB_SIZE; at += PCOW_PAGE_SIZE) {
        unsigned char byte = at == 4096                            ? 'x'
                             : at == PCOW_SLAB_SIZE + 32 * KIB ? 'z'
                                                                  : 0;

        if (memory[at] != byte || memory[at + 4095] != 0)
            fail_msg("%llu reads %u", (unsigned long long)at, memory[at]);
    }
}

enum loader { BY_PROGRAM, BY_KERNEL, BY_KERNEL_PREPARED, LOADERS };

static void load_holes(enum pcow_engine engine, enum loader loader)
{
    struct pcow_map_options options = {
        .engine = engine,
        .full_policy = PCOW_FULL_FAIL,
        .serves_sigbus = serve_bus(),
    };
    struct pcow_map_stats stats;
    unsigned char *memory;
    pcow_image *image;
    pcow_map *map;
    int pipes[2];

    make_holes();
    image = must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
    pool_fill();
    if (loader == BY_KERNEL_PREPARED)
        MUST(pcow_map_resolve(map, 0, 2 * PCOW_SLAB_SIZE, false, &error));
    if (loader != BY_PROGRAM) {
        assert_int_equal(pipe(pipes), 0);
        for (uint64_t at = 0; at < 2 * PCOW_SLAB_SIZE; at += PCOW_PAGE_SIZE) {
            unsigned char byte;

            if (write(pipes[1], memory + at, 1) != 1) {
                assert_int_equal(loader, BY_KERNEL);
                assert_int_equal(errno, EFAULT);
                assert_int_equal(pcow_map_show_holes(map, at, 1), 1);
                assert_int_equal(write(pipes[1], memory + at, 1), 1);
            }
            assert_int_equal(read(pipes[0], &byte, 1), 1);
            assert_int_equal(byte, memory[at]);
        }
        close(pipes[0]);
        close(pipes[1]);
        assert_int_equal(pcow_map_show_holes(map, 0, 2 * PCOW_SLAB_SIZE), 0);
        assert_int_equal(pcow_map_show_holes(map, SIZE, 1), -EFAULT);
        assert_int_equal(pcow_map_show_holes(map, SIZE - 1, UINT64_MAX / 2), 0);
    }
    must_load_holes(memory);
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.pool_full_waits, 0);
    assert_true(count_mappings(memory, SIZE) <= stats.vmas);
    assert_int_equal(pcow_map_resolve(map, 8192, 1, true, NULL), -ENOSPC);
    pool_resize("96m");
    memory[8192] = 7;
    memory[PCOW_SLAB_SIZE + 8192] = 8;
    assert_int_equal(memory[8192] + memory[PCOW_SLAB_SIZE + 8192], 15);
    memory[8192] = memory[PCOW_SLAB_SIZE + 8192] = 0;
    must_load_holes(memory);
    MUST(pcow_snapshot_create(image, "s", &error));
    must_load_holes(memory);
    pcow_map_get_stats(map, &stats);
    assert_true(count_mappings(memory, SIZE) <= stats.vmas);
    end(image, map);
}

static void test_holes(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned loader = 0; loader < LOADERS && is_for_sanitizer(engine); loader++)
            load_holes(engine, loader);
}

/* Every other page is one: there are more of them than mappings. */
static void load_many_holes(enum pcow_engine engine)
{
    static const char zeros[PCOW_SLAB_SIZE];
    const struct pcow_create_options options = {.base = path_in_pool("base.pcow")};
    const struct pcow_map_options how = {
        .engine = engine,
        .full_policy = PCOW_FULL_FAIL,
        .vma_budget = FEW_MAPPINGS,
        .serves_sigbus = serve_bus(),
    };
    struct pcow_map_stats stats;
    unsigned char *memory;
    pcow_image *image;
    pcow_map *map;

    image = must_create(options.base, SIZE, 4096, NULL);
    for (uint64_t at = 0; at < SIZE / 2; at += PCOW_SLAB_SIZE)
        MUST(pcow_write(image, at, zeros, sizeof zeros, &error));
    for (uint64_t at = 0; at < SIZE / 2; at += 2 * PCOW_PAGE_SIZE)
        MUST(pcow_write(image, at, "x", 1, &error));
    pcow_close(image);
    pool_make_sparse("base.pcow");
    MUST(pcow_create(path_in_pool("top.pcow"), &options, &error));
    image = must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
    MUST(pcow_map_create(image, &how, &map, &error));
    memory = pcow_map_address(map);
    memory[0] = 'a';
    pool_fill();
    memory[0] = 'b';
    for (unsigned turn = 0; turn < 2; turn++) {
        for (uint64_t at = 0; at < SIZE / 2; at += PCOW_PAGE_SIZE) {
            unsigned char byte = at == 0                        ? 'b'
                                 : at / PCOW_PAGE_SIZE % 2 == 0 ? 'x'
                                                                : 0;

            assert_int_equal(((volatile unsigned char *)memory)[at], byte);
            assert_int_equal(memory[at + 4095], 0);
        }
        pcow_map_get_stats(map, &stats);
        assert_true(count_mappings(memory, SIZE) <= stats.vmas);
        assert_true(stats.vmas <= FEW_MAPPINGS + MORE_FOR_HOLES);
        pool_resize("96m");
    }
    memory[PCOW_PAGE_SIZE] = memory[PCOW_SLAB_SIZE + PCOW_PAGE_SIZE] = 'c';
    assert_int_equal(memory[PCOW_PAGE_SIZE] + memory[PCOW_SLAB_SIZE + PCOW_PAGE_SIZE], 2 * 'c');
    end(image, map);
}

static void test_many_holes(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        if (is_for_sanitizer(engine))
            load_many_holes(engine);
}

/* What was cut off is no hole: a load of it fails. */
static void test_no_hole(void **state)
{
    pcow_image *image;
    pcow_map *map;

    (void)state;
    assert_true(serve_bus());
    make_holes();
    image = must_open(path_in_pool("top.pcow"), PCOW_OPEN_WRITE);
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    *(volatile char *)pcow_map_address(map) = 1;
    pool_fill();
    assert_int_equal(truncate(path_in_pool("base.pcow"), 3 * PCOW_SLAB_SIZE), 0);
    assert_int_equal(truncate(path_in_pool("top.pcow"), 3 * PCOW_SLAB_SIZE), 0);
    assert_int_equal(pcow_map_show_holes(map, 0, SIZE), -EFAULT);
    pcow_map_destroy(map);
    pcow_close(image);
}

#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_cold_slabs),
        POOL_TEST(test_copy_on_read),
        POOL_TEST(test_mapped_slabs),
        POOL_TEST(test_holes),
        POOL_TEST(test_many_holes),
        POOL_TEST(test_no_hole),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
