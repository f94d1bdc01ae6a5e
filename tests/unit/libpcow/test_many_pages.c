/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What many pages cost: how often data is put on the medium, class page-cache, and how the time
 * grows with what an image holds.
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "operations/operations.h"
#include "persist/observer.h"

#define SLABS 8u
#define SIZE (SLABS * PCOW_SLAB_SIZE)

static unsigned syncs;

static int look(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    syncs += observation->what == OBSERVED_SYNC || observation->what == OBSERVED_MSYNC;
    return 0;
}

static struct observer counting = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};

static pcow_image *open_counting(const char *path)
{
    pcow_image *image;

    MUST(image_open(path, PCOW_OPEN_WRITE, NULL, &counting, &image, &error));
    syncs = 0;
    return image;
}

static pcow_image *open_overlay(void)
{
    pcow_close(must_create_overlay(SIZE, 7));
    return open_counting(scratch("top.pcow"));
}

/* All of it, but for a byte here and there. */
static void expect(pcow_image *image, unsigned char fill)
{
    char *bytes = malloc(SIZE), *expected = malloc(SIZE);

    memset(expected, fill, SIZE);
    MUST(pcow_read(image, 0, bytes, SIZE, &error));
    assert_memory_equal(bytes, expected, SIZE);
    free(bytes);
    free(expected);
}

static void close_and_check(pcow_image *image)
{
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* Two for the first change and the end of file, and one or two for each slab at the most. */
static void expect_few_syncs(void)
{
    assert_in_range(syncs, 1, 8 + 2 * SLABS);
}

static void test_zeroes_over_a_base(void **state)
{
    pcow_image *image = open_overlay();
    struct pcow_info info;

    (void)state;
    MUST(pcow_write_zeroes(image, 0, SIZE, &error));
    MUST(pcow_flush(image, &error));
    expect_few_syncs();
    expect(image, 0);
    pcow_get_info(image, &info);
    assert_in_range(info.allocated_size, 0, 64 * KIB);
    close_and_check(image);
    image = must_open(scratch("top.pcow"), 0);
    expect(image, 0);
    pcow_close(image);
}

/* Some are own, some are not, and what is stored to them afterwards takes their place. */
static void test_zeroes_of_all_kinds(void **state)
{
    pcow_image *image = open_overlay();
    static const char data[3 * 4096] = {[0 ... sizeof data - 1] = 9};

    (void)state;
    for (uint64_t at = 0; at < SIZE; at += 64 * KIB)
        MUST(pcow_write(image, at, data, sizeof data, &error));
    MUST(pcow_snapshot_create(image, "one", &error));
    for (uint64_t at = 8192; at < SIZE; at += 64 * KIB)
        MUST(pcow_write(image, at, data, sizeof data, &error));
    syncs = 0;
    MUST(pcow_write_zeroes(image, 4096, SIZE - 4096, &error));
    expect_few_syncs();
    MUST(pcow_write_zeroes(image, 0, 4096, &error));
    expect(image, 0);
    MUST(pcow_write(image, PCOW_SLAB_SIZE + 4096 * 5, data, 1, &error));
    assert_reads(image, PCOW_SLAB_SIZE + 4096 * 5, "\x09\0\0", 3);
    MUST(pcow_snapshot_revert(image, "one", &error));
    assert_reads(image, 64 * KIB, data, sizeof data);
    close_and_check(image);
}

static void test_safe_rebase(void **state)
{
    pcow_image *image;

    (void)state;
    pcow_close(must_create(scratch("other.pcow"), SIZE, 0, NULL));
    image = open_overlay();
    MUST(pcow_rebase(image, scratch("other.pcow"), NULL, false, NULL, NULL, &error));
    expect_few_syncs();
    expect(image, 7);
    close_and_check(image);
}

/* Every other page differs: as many runs as can be. */
static void test_safe_rebase_in_runs(void **state)
{
    static const char same[4096] = {[0 ... 4095] = 7};
    pcow_image *image = must_create(scratch("other.pcow"), SIZE, 0, NULL);

    (void)state;
    for (uint64_t at = 0; at < SIZE; at += 8192)
        MUST(pcow_write(image, at, same, sizeof same, &error));
    pcow_close(image);
    image = open_overlay();
    MUST(pcow_rebase(image, scratch("other.pcow"), NULL, false, NULL, NULL, &error));
    expect_few_syncs();
    expect(image, 7);
    pcow_close(image);
    image = must_open(scratch("top.pcow"), PCOW_OPEN_NO_BASE);
    MUST_FAIL(-ENOLINK, pcow_read(image, 0, &(char){0}, 1, &error));
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* Of what is written every other page is own. */
static void test_write_over_runs(void **state)
{
    pcow_image *image = open_overlay();
    char *data = malloc(SIZE);

    (void)state;
    memset(data, 3, SIZE);
    for (uint64_t at = 0; at < SIZE; at += 8192)
        MUST(pcow_write(image, at, data, 4096, &error));
    syncs = 0;
    MUST(pcow_write(image, 100, data, SIZE - 200, &error));
    expect_few_syncs();
    memset(data, 7, SIZE);
    memset(data, 3, 4096);
    memset(data + 100, 3, SIZE - 200);
    assert_reads(image, 0, data, SIZE);
    free(data);
    close_and_check(image);
}

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/*
 * 4,000 pages here and there in a terabyte, and nothing to copy: milliseconds. With a look at all
 * of the rest for each it was half a minute.
 */
static void test_rebase_of_much_that_is_empty(void **state)
{
    static const char page[4096] = {1};
    uint64_t size = UINT64_C(1) << 40;
    pcow_image *image;
    double begun;

    (void)state;
    pcow_close(must_create(scratch("base.pcow"), size, 0, NULL));
    pcow_close(must_create(scratch("other.pcow"), size, 0, NULL));
    image = must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
    for (uint64_t i = 0; i < 4000; i++)
        MUST(
            pcow_write(image, i * 4 * 64 * MIB % size + i % 512 * 4096, page, sizeof page, &error));
    begun = seconds();
    MUST(pcow_rebase(image, scratch("other.pcow"), NULL, false, NULL, NULL, &error));
    assert_true(seconds() - begun < 3);
    close_and_check(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_zeroes_over_a_base, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_zeroes_of_all_kinds, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_safe_rebase, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_safe_rebase_in_runs, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_write_over_runs, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_rebase_of_much_that_is_empty, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
