/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * File systems whose blocks are smaller than a page, which are nearly full. Metadata is stored
 * through a mapping, where the kernel wants blocks for the whole page: what is missing must be an
 * error before, and never a signal. Needs root, to mount them.
 */
#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK 1024u
#define MOST_FREE 32u                  /* blocks; with more every operation has enough */
#define METADATA (2 * MIB)             /* the head of a group */

static char image_path[600], filler_path[600];

static int mount_disk(void **state, const char *make, const char *size)
{
    if (pool_mount_disk(state, make, size))
        return -1;
    snprintf(image_path, sizeof image_path, "%s/image.pcow", pool_directory());
    snprintf(filler_path, sizeof filler_path, "%s/filler", pool_directory());
    return 0;
}

static int ext4_mount(void **state)
{
    return mount_disk(state, "mkfs.ext4 -q -b 1024 -m 0", "16M");
}

static int xfs_mount(void **state)
{
    return mount_disk(state, "mkfs.xfs -q -b size=1024", "300M");
}

/*
 * As cp --sparse=always leaves it, and the versions before this test did, which wrote the first
 * record alone.
 */
static void take_zeros_out(void)
{
    static const char zeros[BLOCK];
    char block[BLOCK];
    int fd = open(image_path, O_RDWR | O_CLOEXEC);

    assert_true(fd >= 0);
    for (off_t at = 0; at < (off_t)METADATA; at += BLOCK) {
        assert_int_equal(pread(fd, block, sizeof block, at), sizeof block);
        if (memcmp(block, zeros, sizeof block) == 0)
            assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, BLOCK),
                             0);
    }
    assert_int_equal(fsync(fd), 0);
    close(fd);
}

static int on_image(int (*operation)(pcow_image *image))
{
    pcow_image *image;
    int ret = pcow_open(image_path, PCOW_OPEN_WRITE, NULL, &image, NULL);

    if (ret)
        return ret;
    ret = operation(image);
    pcow_close(image);
    return ret;
}

static int snapshot(pcow_image *image)
{
    return pcow_snapshot_create(image, "new", NULL);
}

static int revert(pcow_image *image)
{
    return pcow_snapshot_revert(image, "one", NULL);
}

static int delete(pcow_image *image)
{
    return pcow_snapshot_delete(image, "one", NULL, NULL);
}

static int rename_it(pcow_image *image)
{
    return pcow_snapshot_rename(image, "one", "two", NULL);
}

static int store_state(pcow_image *image)
{
    int ret = pcow_snapshot_write_state(image, "one", 0, "state", 5, NULL);

    return ret ? ret : pcow_snapshot_set_state_size(image, "one", 5, NULL);
}

static int grow(pcow_image *image)
{
    return pcow_resize(image, 64 * MIB, false, NULL);
}

static int write_page(pcow_image *image)
{
    return pcow_write(image, 4 * MIB + 12345, "some", 4, NULL);
}

static int write_old_slab(pcow_image *image)
{
    return pcow_write(image, 1 * MIB, "some", 4, NULL);
}

static int copy_on_read(pcow_image *image)
{
    return pcow_set_copy_on_read(image, true, NULL);
}

static int seal(pcow_image *image)
{
    return pcow_seal(image, NULL);
}

/* Stores of a guest: a page of a new slab, and one that is own. */
static int map_and_store(pcow_image *image)
{
    pcow_map *map;
    int ret = pcow_map_create(image, NULL, &map, NULL);

    if (ret)
        return ret;
    for (uint64_t offset = 0; offset <= 6 * MIB && !ret; offset += 3 * MIB) {
        ret = pcow_map_prepare(map, offset, 1, true, NULL);
        if (!ret)
            ((volatile char *)pcow_map_address(map))[offset] = 1;
    }
    pcow_map_destroy(map);
    return ret;
}

static void make_image(bool sparse)
{
    pcow_image *image = must_create(image_path, 32 * MIB, 0, NULL);

    write_text(image, 0, "text");
    MUST(pcow_snapshot_create(image, "one", &error));
    write_text(image, 2 * MIB, "more");
    MUST(pcow_flush(image, &error));
    pcow_close(image);
    if (sparse)
        take_zeros_out();
}

/* In a child, as a signal would be the end of it. Whether it had enough. */
static bool has_enough(const char *name, int (*operation)(pcow_image *image), unsigned left,
                       bool sparse)
{
    struct pcow_check_result found;
    int status;
    pid_t child = fork();

    if (child == 0) {
        int ret;

        /* That of cmocka would go on with the next test. */
        signal(SIGBUS, SIG_DFL);
        ret = on_image(operation);
        _exit(ret == 0 ? 0 : ret == -ENOSPC ? 1 : 2);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) > 1)
        fail_msg("%s with %u blocks left%s: status %#x", name, left, sparse ? ", sparse" : "",
                 (unsigned)status);
    /* What could not be given back for want of space is a leak. */
    MUST(pcow_check(image_path, 0, NULL, NULL, &found, &error));
    assert_int_equal(found.corruptions, 0);
    return WEXITSTATUS(status) == 0;
}

static bool try(const char *name, int (*operation)(pcow_image *image), unsigned left, bool sparse)
{
    unlink(filler_path);
    unlink(image_path);
    make_image(sparse);
    pool_fill_disk(left * BLOCK);
    return has_enough(name, operation, left, sparse);
}

static void test_full_pool_is_an_error(void **state)
{
    static const struct {
        const char *name;
        int (*operation)(pcow_image *image);
    } operations[] = {
        {"snapshot", snapshot},
        {"revert", revert},
        {"delete", delete},
        {"rename", rename_it},
        {"state", store_state},
        {"grow", grow},
        {"write", write_page},
        {"write to a slab that is there", write_old_slab},
        {"copy on read", copy_on_read},
        {"seal", seal},
        {"map", map_and_store},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof operations / sizeof *operations; i++)
        for (unsigned sparse = 0; sparse <= 1; sparse++) {
            bool enough = false;

            for (unsigned left = 0; left <= MOST_FREE; left += left < 4 ? 1 : left)
                enough = try(operations[i].name, operations[i].operation, left, sparse);
            unlink(filler_path);
            if (!enough)
                assert_int_equal(on_image(operations[i].operation), 0);
        }
}

static void test_create_leaves_nothing_to_want(void **state)
{
    (void)state;
    for (unsigned left = 0; left <= 2 * MOST_FREE; left += 2) {
        int ret;

        unlink(filler_path);
        unlink(image_path);
        pool_fill_disk(left * BLOCK);
        ret =
            pcow_create(image_path, &(struct pcow_create_options){.virtual_size = 32 * MIB}, NULL);
        assert_true(ret == 0 || ret == -ENOSPC);
        assert_int_equal(access(image_path, F_OK), ret ? -1 : 0);
        if (ret == 0) {
            assert_true(has_enough("seal", seal, left, false));
            assert_int_equal(pcow_unseal(image_path, NULL), 0);
            has_enough("snapshot", snapshot, left, false);
        }
    }
}

static int ext2_mount(void **state)
{
    return mount_disk(state, "mkfs.ext2 -q -b 4096", "16M");
}

/* The guest's first store there would be an error. */
static void test_file_system_without_reservation(void **state)
{
    const struct pcow_create_options options = {.virtual_size = 4 * MIB};
    struct pcow_error why;

    (void)state;
    assert_int_equal(pcow_create(image_path, &options, &why), -EOPNOTSUPP);
    assert_non_null(strstr(why.message, "tmpfs, ext4 or XFS"));
    assert_int_equal(access(image_path, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_full_pool_is_an_error, ext4_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_full_pool_is_an_error, xfs_mount, pool_unmount),
        cmocka_unit_test_setup_teardown(test_create_leaves_nothing_to_want, ext4_mount,
                                        pool_unmount),
        cmocka_unit_test_setup_teardown(test_file_system_without_reservation, ext2_mount,
                                        pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
