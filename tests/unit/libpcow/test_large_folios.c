/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Class page-cache on a full pool, after somebody has read the image in sequence: the page cache
 * has it in large folios, which span its holes. A store to a page that has its block must not fail,
 * nor wait. Needs root, to mount ext4 and XFS.
 */
#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLABS 4u
#define STEP 8u                        /* one page in so many is own */
#define PAGES (SLABS * 512u)
#define HOLE 16u                       /* of each slab a page of zeros, without a block */

static char image_path[600];

static int mount_disk(void **state, const char *make, const char *size)
{
    if (pool_mount_disk(state, make, size))
        return -1;
    snprintf(image_path, sizeof image_path, "%s/image.pcow", pool_directory());
    return 0;
}

static int ext4_mount(void **state)
{
    return mount_disk(state, "mkfs.ext4 -q -b 4096 -m 0", "64M");
}

static int xfs_mount(void **state)
{
    return mount_disk(state, "mkfs.xfs -q", "300M");
}

/* As cp and backups do, from the medium. */
static void read_in_sequence(void)
{
    static char piece[256 * KIB];
    int fd = open(image_path, O_RDONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    while (read(fd, piece, sizeof piece) > 0)
        ;
    close(fd);
}

static void store_pages(pcow_image *image, char with)
{
    char page[4096];

    memset(page, with, sizeof page);
    for (unsigned i = 0; i < PAGES; i += STEP)
        MUST(pcow_write(image, i * UINT64_C(4096), page, sizeof page, &error));
    MUST(pcow_flush(image, &error));
}

/* The tables have their blocks: what is tried are the pages. */
static void make_full_pool(void)
{
    pcow_image *image = must_create(image_path, SLABS * PCOW_SLAB_SIZE, 0, NULL);

    store_pages(image, 1);
    MUST(pcow_snapshot_create(image, "warm", &error));
    store_pages(image, 1);
    pcow_close(image);
    pool_fill_disk(0);
    read_in_sequence();
}

static int map_it(pcow_image **image, pcow_map **map)
{
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL};

    return pcow_open(image_path, PCOW_OPEN_WRITE, NULL, image, NULL)
           || pcow_map_create(*image, &options, map, NULL);
}

static int close_it(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
    return 0;
}

static int store_prepared(void)
{
    pcow_image *image;
    pcow_map *map;

    if (map_it(&image, &map))
        return 2;
    /* As a vCPU that got EFAULT: here no handler can help. */
    signal(SIGBUS, SIG_DFL);
    for (unsigned i = 0; i < PAGES; i += STEP) {
        if (pcow_map_prepare(map, i * UINT64_C(4096), 4096, true, NULL)
            || !pcow_map_is_accessible(map, i * UINT64_C(4096), true))
            return 3;
        ((volatile char *)pcow_map_address(map))[i * UINT64_C(4096)] = 2;
    }
    return close_it(image, map);
}

/* Read once more after it was mapped and stored to. */
static int store_again(void)
{
    pcow_image *image;
    pcow_map *map;
    volatile char *memory;

    if (map_it(&image, &map))
        return 2;
    memory = pcow_map_address(map);
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < PAGES; i += STEP) {
            if (pcow_map_resolve(map, i * UINT64_C(4096), 4096, true, NULL))
                return 3;
            memory[i * UINT64_C(4096)] = 2;
        }
        if (pcow_map_flush(map, 0, SLABS * PCOW_SLAB_SIZE, NULL)
            || madvise((void *)memory, SLABS * PCOW_SLAB_SIZE, MADV_DONTNEED))
            return 4;
        read_in_sequence();
    }
    return close_it(image, map);
}

static int store_unprepared(void)
{
    pcow_image *image;
    pcow_map *map;

    if (map_it(&image, &map))
        return 2;
    for (unsigned i = 0; i < PAGES; i += STEP)
        ((volatile char *)pcow_map_address(map))[i * UINT64_C(4096)] = 2;
    return close_it(image, map);
}

/*
 * A copy of the slab in memory of its own, for want of mappings: what is beside the page that is
 * stored to is in no folio.
 */
static int store_to_copied(void)
{
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL, .vma_budget = 24};
    pcow_image *image;
    volatile char *memory;
    pcow_map *map;

    if (pcow_open(image_path, PCOW_OPEN_WRITE, NULL, &image, NULL)
        || pcow_map_create(image, &options, &map, NULL))
        return 2;
    memory = pcow_map_address(map);
    for (unsigned i = 0; i < PAGES; i += STEP)
        if (memory[i * UINT64_C(4096)] != (i % 512 == HOLE ? 0 : 1))
            return 3;
    for (unsigned stored = 0; stored < PAGES; stored += STEP) {
        if (stored % 512 == HOLE)
            continue;
        memory[stored * UINT64_C(4096) + 1] = 7;
        for (unsigned i = 0; i < PAGES; i += STEP)
            if (memory[i * UINT64_C(4096)] != (i % 512 == HOLE ? 0 : 1))
                return 4;
    }
    return close_it(image, map);
}

/* What the library stores to itself. */
static int change_metadata(void)
{
    pcow_image *image;
    int ret = pcow_open(image_path, PCOW_OPEN_WRITE, NULL, &image, NULL);

    if (ret)
        return 2;
    ret = pcow_snapshot_create(image, "new", NULL);
    if (!ret)
        read_in_sequence();
    if (!ret)
        ret = pcow_snapshot_delete(image, "warm", NULL, NULL);
    pcow_close(image);
    return ret == 0 || ret == -ENOSPC ? 0 : 3;
}

static void run_in_child(int (*work)(void))
{
    struct pcow_check_result found;
    int status;
    pid_t child;

    make_full_pool();
    child = fork();
    if (child == 0) {
        signal(SIGBUS, SIG_DFL);
        _exit(work());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    MUST(pcow_check(image_path, 0, NULL, NULL, &found, &error));
    assert_int_equal(found.corruptions, 0);
}

static void expect_stored(void)
{
    pcow_image *image = must_open(image_path, 0);
    char page[4096], expected[4096];

    memset(expected, 1, sizeof expected);
    expected[0] = 2;
    for (unsigned i = 0; i < PAGES; i += STEP) {
        MUST(pcow_read(image, i * UINT64_C(4096), page, sizeof page, &error));
        assert_memory_equal(page, expected, sizeof page);
    }
    pcow_close(image);
}

static void test_prepared(void **state)
{
    (void)state;
    run_in_child(store_prepared);
    expect_stored();
}

static void test_read_again(void **state)
{
    (void)state;
    run_in_child(store_again);
    expect_stored();
}

static void test_unprepared(void **state)
{
    (void)state;
    run_in_child(store_unprepared);
    expect_stored();
}

static void test_copied(void **state)
{
    struct pcow_check_result found;
    pcow_image *image = must_create(image_path, SLABS * PCOW_SLAB_SIZE, 0, NULL);
    int status;
    pid_t child;

    (void)state;
    store_pages(image, 1);
    for (unsigned slab = 0; slab < SLABS; slab++)
        MUST(pcow_write_zeroes(image, slab * PCOW_SLAB_SIZE + HOLE * UINT64_C(4096), 4096, &error));
    MUST(pcow_flush(image, &error));
    pcow_close(image);
    pool_fill_disk(0);
    read_in_sequence();
    child = fork();
    if (child == 0)
        _exit(store_to_copied());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    MUST(pcow_check(image_path, 0, NULL, NULL, &found, &error));
    assert_int_equal(found.corruptions, 0);
}

static void test_metadata(void **state)
{
    (void)state;
    run_in_child(change_metadata);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_prepared, ext4_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_prepared, xfs_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_read_again, ext4_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_read_again, xfs_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_unprepared, ext4_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_unprepared, xfs_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_copied, ext4_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_copied, xfs_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_metadata, ext4_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_metadata, xfs_mount, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
