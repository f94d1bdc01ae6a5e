/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Class page-cache on a disk that fails below the file system: what it refused is told, stays in
 * memory, and ends no process. The disk is a file on a tmpfs; what is punched out of it and cannot
 * be had again is an area that takes no writes. Needs root, to mount.
 */
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE (8 * MIB)
#define STEP 8u

static char under[600], image_path[600];

static int shell(const char *format, const char *a, const char *b)
{
    char command[3000];

    snprintf(command, sizeof command, format, a, b);
    return system(command);
}

static int mount_on_tmpfs(void **state, const char *make, const char *options)
{
    if (scratch_setup(state))
        return -1;
    snprintf(under, sizeof under, "%s", scratch("under"));
    snprintf(image_path, sizeof image_path, "%s/image.pcow", pool_directory());
    if (mkdir(under, 0700) || mount("pcow-test", under, "tmpfs", 0, "size=90M")
        || mkdir(pool_directory(), 0700))
        return -1;
    return shell(make, under, "") || shell(options, under, pool_directory()) ? -1 : 0;
}

static int ext4_mount(void **state)
{
    /* All of it is there: what takes no writes is punched out. */
    return mount_on_tmpfs(
        state,
        "cd %s%s && head -c 64M /dev/zero > disk && mkfs.ext4 -q -F -b 4096 -m 0 -E nodiscard disk",
        "mount -o loop,errors=remount-ro %s/disk %s");
}

static int xfs_mount(void **state)
{
    return mount_on_tmpfs(state, "cd %s%s && truncate -s 320M disk && mkfs.xfs -q -f disk",
                          "mount -o loop %s/disk %s");
}

static int unmount(void **state)
{
    umount2(pool_directory(), MNT_DETACH);
    umount2(under, MNT_DETACH);
    rmdir(pool_directory());
    rmdir(under);
    return scratch_teardown(state);
}

static void fill_under(void)
{
    assert_int_equal(shell("dd if=/dev/zero of=%s/fill%s bs=4096 2> /dev/null; true", under, ""),
                     0);
}

static void store_pages(pcow_image *image)
{
    char page[4096];

    memset(page, 1, sizeof page);
    for (uint64_t offset = 0; offset < SIZE; offset += STEP * sizeof page)
        MUST(pcow_write(image, offset, page, sizeof page, &error));
    MUST(pcow_flush(image, &error));
}

static void read_in_sequence(off_t from, bool sync)
{
    static char piece[256 * KIB];
    int fd = open(image_path, O_RDONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    if (sync)
        assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, from, 0, POSIX_FADV_DONTNEED), 0);
    lseek(fd, from, SEEK_SET);
    while (read(fd, piece, sizeof piece) > 0)
        ;
    close(fd);
}

static void map_to_fail(pcow_image *image, pcow_map **map)
{
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL};

    MUST(pcow_map_create(image, &options, map, &error));
}

/*
 * The pool is full, so a large folio must go before a page of it can be stored to; and one of its
 * pages cannot be written.
 */
static void test_neighbour_that_cannot_be_written(void **state)
{
    pcow_image *image = must_create(image_path, SIZE, 0, NULL);
    volatile char *memory;
    unsigned refused = 0;
    pcow_map *map;

    (void)state;
    for (unsigned round = 0; round < 2; round++)
        store_pages(image);
    pcow_close(image);
    pool_fill_disk(0);
    read_in_sequence(0, true);
    image = must_open(image_path, PCOW_OPEN_WRITE);
    map_to_fail(image, &map);
    memory = pcow_map_address(map);
    memory[0] = 7;
    assert_int_equal(madvise((void *)(memory + MIB), SIZE - MIB, MADV_DONTNEED), 0);
    read_in_sequence((off_t)(7 * MIB), false);
    /* Slabs 0 to 2 of the file have metadata, so the first page of the data is block 1536. */
    assert_int_equal(shell("p=$(filefrag -v %s | sed 's/[:.]/ /g' |"
                           " awk '$2 == 1536 {print $4}') && "
                           "fallocate -p -o $((p * 4096)) -l 4096 %s/disk",
                           image_path, under),
                     0);
    fill_under();
    for (unsigned page = 256; page < 512; page += STEP) {
        refused += pcow_map_resolve(map, page * UINT64_C(4096), 1, true, NULL) != 0;
        assert_int_equal(memory[0], 7);
    }
    if (!refused)
        print_message("no large folio had to go\n");
    assert_int_not_equal(pcow_map_flush(map, 0, SIZE, NULL), 0);
    assert_int_equal(memory[0], 7);
    pcow_map_destroy(map);
    pcow_close(image);
}

static void trigger_error(void)
{
    struct stat status;
    char command[700];

    assert_int_equal(stat(pool_directory(), &status), 0);
    snprintf(command, sizeof command,
             "name=$(basename $(readlink /sys/dev/block/%u:%u)) && echo test > "
             "/sys/fs/ext4/$name/trigger_fs_error",
             major(status.st_dev), minor(status.st_dev));
    assert_int_equal(system(command), 0);
}

/*
 * That is an I/O error of the page, as any; no store to memory that is read-only, which would be
 * the end of the process.
 */
static void test_file_system_that_became_read_only(void **state)
{
    pcow_image *image = must_create(image_path, 64 * MIB, 0, NULL);
    volatile char *memory;
    int ret = 0;
    pcow_map *map;

    (void)state;
    map_to_fail(image, &map);
    memory = pcow_map_address(map);
    memory[0] = 1;
    trigger_error();
    /* For some slabs there is space already. */
    for (uint64_t offset = 0; offset < 64 * MIB && !ret; offset += PCOW_SLAB_SIZE)
        ret = pcow_map_trap(map, offset, true);
    assert_int_equal(ret, -EIO);
    assert_int_equal(memory[0], 1);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* The file system ends between a store of metadata and the request that it be written. */
static void test_file_system_that_ends(void **state)
{
    pcow_image *image = must_create(image_path, SIZE, 0, NULL);
    char name[20];
    int ret = 0;
    pcow_map *map;

    (void)state;
    store_pages(image);
    map_to_fail(image, &map);
    *(volatile char *)pcow_map_address(map) = 7;
    assert_int_equal(shell("cd %s%s && sync -f . && n=$(xfs_db -r -c 'sb 0' -c 'p logstart' disk | "
                           "awk '{print $3}') && "
                           "at=$(xfs_db -r -c \"convert fsblock $n byte\" disk | sed "
                           "'s/.*(\\(.*\\))/\\1/') && fallocate -p -o $at -l 64M disk",
                           under, ""),
                     0);
    fill_under();
    for (unsigned i = 0; i < 200 && !ret; i++) {
        snprintf(name, sizeof name, "s%u", i);
        ret = pcow_snapshot_create(image, name, NULL);
    }
    assert_int_not_equal(ret, 0);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_neighbour_that_cannot_be_written, ext4_mount, unmount),
        cmocka_unit_test_setup_teardown(test_file_system_that_became_read_only, ext4_mount,
                                        unmount),
        cmocka_unit_test_setup_teardown(test_file_system_that_ends, xfs_mount, unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
