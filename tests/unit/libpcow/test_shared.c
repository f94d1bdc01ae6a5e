/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Blocks that a copy of the file has as well. The program is linked so that ioctl() and fallocate()
 * pass by here, which then tell of a file system on which all blocks are shared;
 * test_shared_blocks.py has a real one.
 */
#include "support.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "image/image.h"
#include "operations/operations.h"

#define SIZE (4 * PCOW_SLAB_SIZE)
#define BAD UINT64_C(37)               /* page of the first slab */

static struct {
    bool armed;
    int error;                         /* of a request to unshare, 0: none */
    uint64_t from, to;                 /* only if it concerns these bytes of the file */
    unsigned requests;
} unshare;

int __real_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...);
int __real_fallocate64(int fd, int mode, off_t offset, off_t length);
int __wrap_fallocate64(int fd, int mode, off_t offset, off_t length);

int __wrap_ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    void *argument;

    va_start(arguments, request);
    argument = va_arg(arguments, void *);
    va_end(arguments);
    if (unshare.armed && request == FS_IOC_FIEMAP) {
        struct fiemap *map = argument;

        map->fm_mapped_extents = 1;
        map->fm_extents[0] =
            (struct fiemap_extent){.fe_logical = map->fm_start,
                                   .fe_length = map->fm_length,
                                   .fe_flags = FIEMAP_EXTENT_SHARED | FIEMAP_EXTENT_LAST};
        return 0;
    }
    return __real_ioctl(fd, request, argument);
}

int __wrap_fallocate64(int fd, int mode, off_t offset, off_t length)
{
    if (!unshare.armed || mode != FALLOC_FL_UNSHARE_RANGE)
        return __real_fallocate64(fd, mode, offset, length);
    unshare.requests++;
    if (unshare.error == 0 || (uint64_t)offset >= unshare.to
        || (uint64_t)(offset + length) <= unshare.from)
        return 0;
    errno = unshare.error;
    return -1;
}

/* From now on the blocks of the image are shared, and to make those in the range its own fails. */
static void share(pcow_image *image, int error, uint64_t from, uint64_t to)
{
    image->file.may_share = true;
    unshare.armed = true;
    unshare.error = error;
    unshare.from = from;
    unshare.to = to;
    unshare.requests = 0;
}

static int teardown(void **state)
{
    unshare.armed = false;
    return scratch_teardown(state);
}

static pcow_image *make_image(void)
{
    pcow_image *image = must_create(scratch("image"), SIZE, 0, NULL);
    char *data = malloc(PCOW_SLAB_SIZE);

    assert_non_null(data);
    memset(data, 7, PCOW_SLAB_SIZE);
    MUST(pcow_write(image, 0, data, PCOW_SLAB_SIZE, &error));
    MUST(pcow_flush(image, &error));
    free(data);
    pcow_close(image);
    return must_open(scratch("image"), PCOW_OPEN_WRITE);
}

/*
 * To make a block its own it has to be read. What cannot be read keeps nobody from the pages beside
 * it.
 */
static void test_unreadable_page(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    uint64_t in_file;

    (void)state;
    for (in_file = 1; in_file < image_slab_count(image) && !slab_holds(image, in_file, 0);
         in_file++)
        ;
    in_file = (in_file << SLAB_BITS) + BAD * PCOW_PAGE_SIZE;
    share(image, EIO, in_file, in_file + PCOW_PAGE_SIZE);
    for (uint64_t page = 0; page < PAGES_PER_SLAB; page++) {
        struct pcow_error error = {0};

        assert_int_equal(pcow_map_resolve(map, page * PCOW_PAGE_SIZE, 1, true, &error),
                         page == BAD ? -EIO : 0);
    }
    assert_true(unshare.requests > 0);
    unshare.armed = false;
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("image"));
}

/* Tables are stored to through a mapping, where a full pool would be a signal. */
static void test_tables_on_a_full_pool(void **state)
{
    pcow_image *image = make_image();
    uint64_t count = image_slab_count(image), slab;

    (void)state;
    share(image, ENOSPC, 0, UINT64_MAX);
    assert_int_equal(slab_take(image, &slab), -ENOSPC);
    assert_int_equal(unshare.requests, 1);
    unshare.error = 0;
    assert_int_equal(slab_take(image, &slab), 0);
    assert_true(slab <= count);
    slab_untake(image, slab);
    unshare.armed = false;
    pcow_close(image);
    must_be_clean(scratch("image"));
}

static int look(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    (void)observation;
    return 0;
}

/* Nor may data of class pmem be stored over before its blocks are its own. */
static void test_overwrite_in_class_pmem(void **state)
{
    struct observer observer = {.look = look, .persistence = PCOW_PERSISTENCE_PMEM};
    pcow_image *image = make_image();
    char page[PCOW_PAGE_SIZE] = {9};

    (void)state;
    pcow_close(image);
    MUST(image_open(scratch("image"), PCOW_OPEN_WRITE, NULL, &observer, &image, &error));
    MUST(image_begin_change(image, &error));
    share(image, ENOSPC, 0, UINT64_MAX);
    MUST_FAIL(-ENOSPC, pcow_write(image, 0, page, sizeof page, &error));
    unshare.error = 0;
    MUST(pcow_write(image, 0, page, sizeof page, &error));
    assert_reads(image, 0, page, sizeof page);
    unshare.armed = false;
    pcow_close(image);
    must_be_clean(scratch("image"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_unreadable_page, scratch_setup, teardown),
        cmocka_unit_test_setup_teardown(test_tables_on_a_full_pool, scratch_setup, teardown),
        cmocka_unit_test_setup_teardown(test_overwrite_in_class_pmem, scratch_setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
