/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Many of a thing: 10,000 snapshots, a chain of 100 files. The times are printed; what must not
 * grow is asserted, with room for a busy machine.
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SNAPSHOTS 10000u
#define FILES 100u

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static const char *name_of(unsigned i)
{
    static char name[32];

    snprintf(name, sizeof name, "snapshot-%u", i);
    return name;
}

static int ascending(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;

    return a < b ? -1 : a > b;
}

/* Median of 101 creations from number first on. */
static double create_some(pcow_image *image, unsigned first)
{
    double time[101];

    for (unsigned i = 0; i < 101; i++) {
        double start = now();

        MUST(pcow_snapshot_create(image, name_of(first + i), &error));
        time[i] = now() - start;
    }
    qsort(time, 101, sizeof time[0], ascending);
    return time[50];
}

static void test_ten_thousand_snapshots(void **state)
{
    pcow_image *image = must_create(scratch("t"), 64 * MIB, 0, NULL);
    struct pcow_snapshot *list;
    double few, many, start;
    size_t count;

    (void)state;
    MUST(pcow_write(image, 0, "first", 6, &error));
    few = create_some(image, 0);
    start = now();
    for (unsigned i = 101; i < SNAPSHOTS - 101; i++) {
        if (i % 4 == 0)
            MUST(pcow_write(image, i * 8192 % (64 * MIB), &i, sizeof i, &error));
        MUST(pcow_snapshot_create(image, name_of(i), &error));
    }
    many = create_some(image, SNAPSHOTS - 101);
    print_message("create: %.1f us with 50 snapshots, %.1f us with %u; %u in %.2f s\n", few * 1e6,
                  many * 1e6, SNAPSHOTS, SNAPSHOTS, now() - start);
    /* A scan of the records would be 200 times slower. */
    assert_true(many < few * 10 + 50e-6);
    start = now();
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    print_message("list: %.3f s\n", now() - start);
    assert_int_equal(count, SNAPSHOTS);
    assert_true(now() - start < 2);
    free(list);
    pcow_close(image);
    start = now();
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    print_message("open: %.3f s\n", now() - start);
    MUST_FAIL(-EEXIST, pcow_snapshot_create(image, name_of(SNAPSHOTS / 2), &error));
    start = now();
    MUST(pcow_snapshot_revert(image, name_of(0), &error));
    print_message("revert to the first: %.6f s\n", now() - start);
    assert_reads(image, 0, "first", 6);
    assert_reads(image, 104 * 8192, "", 1);
    pcow_close(image);
    must_be_clean(scratch("t"));
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    /*
     * The oldest goes into the next, as when old ones are given up in turn; then the newest, which
     * nothing stands on.
     */
    start = now();
    for (unsigned i = 0; i < 100; i++)
        MUST(pcow_snapshot_delete(image, name_of(i), NULL, &error));
    print_message("delete the oldest 100: %.3f s\n", now() - start);
    start = now();
    for (unsigned i = SNAPSHOTS; i-- > 100;)
        MUST(pcow_snapshot_delete(image, name_of(i), NULL, &error));
    print_message("delete the others, newest first: %.2f s\n", now() - start);
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 0);
    free(list);
    assert_reads(image, 0, "first", 6);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

static void test_a_chain_of_a_hundred_files(void **state)
{
    struct pcow_create_options options = {0};
    char path[32], base[600];
    pcow_image *image = must_create(scratch("f0"), 16 * MIB, 4096, NULL);
    unsigned char byte;
    pcow_map *map;
    double start;

    (void)state;
    for (unsigned i = 0; i < FILES; i++) {
        byte = (unsigned char)(i + 1);
        MUST(pcow_write(image, i * 4096, &byte, 1, &error));
        MUST(pcow_write(image, MIB, &byte, 1, &error));
        MUST(pcow_snapshot_create(image, "s", &error));
        pcow_close(image);
        if (i + 1 == FILES)
            break;
        /* Every other one stands on the snapshot, the rest on the present state. */
        snprintf(base, sizeof base, "%s/f%u", scratch_directory(), i);
        snprintf(path, sizeof path, "f%u", i + 1);
        options = (struct pcow_create_options){.base = base, .base_snapshot = i % 2 ? "s" : NULL};
        MUST(pcow_create(scratch(path), &options, &error));
        image = must_open(scratch(path), PCOW_OPEN_WRITE);
    }
    start = now();
    image = must_open(scratch(path), PCOW_OPEN_WRITE);
    print_message("open %u files: %.4f s\n", FILES, now() - start);
    start = now();
    MUST(pcow_map_create(image, NULL, &map, &error));
    print_message("map: %.4f s\n", now() - start);
    for (unsigned i = 0; i < FILES; i++) {
        unsigned char *page = (unsigned char *)pcow_map_address(map) + i * 4096;

        assert_int_equal(*page, i + 1);
        assert_reads(image, i * 4096, page, 4096);
        page[1] = 0xee;
        assert_int_equal(*page, i + 1);
    }
    assert_int_equal(*((unsigned char *)pcow_map_address(map) + MIB), FILES);
    /* Forked while it is mapped: the fork is the 101st. */
    MUST(pcow_snapshot_create(image, "live", &error));
    *((unsigned char *)pcow_map_address(map) + MIB) = 0;
    snprintf(base, sizeof base, "%s", pcow_path(image));
    options = (struct pcow_create_options){.base = base, .base_snapshot = "live"};
    MUST(pcow_create(scratch("fork"), &options, &error));
    pcow_map_destroy(map);
    pcow_close(image);
    image = must_open(scratch("fork"), PCOW_OPEN_WRITE);
    byte = FILES;
    assert_reads(image, MIB, &byte, 1);
    assert_reads(image, 5 * 4096, (unsigned char[]){6, 0xee}, 2);
    MUST(pcow_write(image, MIB, "fork", 5, &error));
    assert_reads(image, MIB, "fork", 5);
    pcow_close(image);
    must_be_clean(scratch("fork"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_ten_thousand_snapshots),
        TEST(test_a_chain_of_a_hundred_files),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
