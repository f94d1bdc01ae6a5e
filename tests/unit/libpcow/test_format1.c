/* SPDX-License-Identifier: BSD-3-Clause */
/* What is read of a format 1 file. */
#include "format1_files.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void test_one_segment(void **state)
{
    struct builder b = build("a.v1", 65536, 64, NULL);
    struct pcow_info info;
    pcow_image *image;

    (void)state;
    put_cluster(&b, 3, 0, 1);
    put_cluster(&b, 0, 0, 2);
    put_cluster(&b, 63, 0, 3);
    /* Clusters that the prototype had allocated in advance. */
    assert_int_equal(ftruncate(b.fd, (off_t)b.end + 5 * 65536), 0);
    close(b.fd);
    image = open_1("a.v1");
    assert_int_equal(pcow_size(image), 64 * 65536);
    pcow_get_info(image, &info);
    assert_int_equal(info.format, 1);
    assert_int_equal(info.cluster_size, 65536);
    assert_int_equal(info.data_size, 3 * 65536);
    assert_int_equal(info.snapshots, 0);
    assert_int_equal(info.chain_depth, 1);
    assert_false(info.has_base);
    for (uint32_t page = 0; page < 1024; page++)
        expect_page(image, page, page / 16 == 3 ? 1 : page / 16 == 0 ? 2 : page / 16 == 63 ? 3 : 0);
    pcow_close(image);
}

static void test_cluster_size_in_kb(void **state)
{
    struct builder b = build("kb.v1", 65536, 32, NULL);
    pcow_image *image;

    (void)state;
    put32(&b, 0, 64);
    put_cluster(&b, 5, 0, 1);
    close(b.fd);
    image = open_1("kb.v1");
    assert_int_equal(pcow_size(image), 32 * 65536);
    expect_page(image, 5 * 16 + 7, 1);
    expect_page(image, 4 * 16 + 7, 0);
    pcow_close(image);
}

static void test_several_segments(void **state)
{
    struct builder b = build("segments.v1", 4096, 4096, NULL);
    pcow_image *image;

    (void)state;
    /*
     * 504 entries each: four segments, the last one not full; in an order that is not the guest's.
     */
    for (uint32_t i = 0; i < 1600; i++)
        put_cluster(&b, i * 997 % 4096, 0, (uint8_t)(1 + i % 5));
    assert_int_equal(b.segment, 3);
    close(b.fd);
    image = open_1("segments.v1");
    for (uint32_t i = 0; i < 4096; i++)
        expect_page(image, i * 997 % 4096, i < 1600 ? (uint8_t)(1 + i % 5) : 0);
    pcow_close(image);
}

static void test_a_full_segment_is_the_last(void **state)
{
    struct builder b = build("full.v1", 4096, 1024, NULL);
    pcow_image *image;

    (void)state;
    for (uint32_t i = 0; i < 504; i++)
        put_cluster(&b, 1023 - i, 0, 1);
    close(b.fd);
    image = open_1("full.v1");
    for (uint32_t i = 0; i < 1024; i++)
        expect_page(image, i, i >= 1024 - 504 ? 1 : 0);
    pcow_close(image);
}

static void test_later_entries_and_snapshots_hide_earlier(void **state)
{
    struct builder b = build("snapshots.v1", 16384, 256, NULL);
    struct pcow_info info;
    pcow_image *image;

    (void)state;
    put_cluster(&b, 1, 0, 1);
    put_cluster(&b, 2, 0, 1);
    put_cluster(&b, 3, 0, 1);
    put_cluster(&b, 3, 0, 2);
    put_super(&b, 16384, 256, NULL);
    put_cluster(&b, 2, 0, 3);
    put_super(&b, 16384, 256, NULL);
    put_super(&b, 16384, 256, NULL);
    put_cluster(&b, 1, 0x4, 4);
    close(b.fd);
    image = open_1("snapshots.v1");
    pcow_get_info(image, &info);
    assert_int_equal(info.snapshots, 3);
    assert_int_equal(info.data_size, 3 * 16384);
    expect_page(image, 4, 1);
    expect_page(image, 5, 1);
    expect_page(image, 6, 4);
    expect_page(image, 7, 1);
    for (uint32_t page = 8; page < 12; page++)
        expect_page(image, page, 3);
    for (uint32_t page = 12; page < 16; page++)
        expect_page(image, page, 2);
    pcow_close(image);
}

static void test_partly_copied_clusters_fall_through(void **state)
{
    struct builder b = build("partly.v1", 131072, 64, NULL);
    pcow_image *image;

    (void)state;
    put_cluster(&b, 7, 0, 1);
    put_super(&b, 131072, 64, NULL);
    put_cluster(&b, 7, 0x0000ff00, 2);
    put_super(&b, 131072, 64, NULL);
    put_cluster(&b, 7, 0x80000101, 3);
    /* Nothing older below this one: what was not copied reads as zeros. */
    put_cluster(&b, 9, 0x2, 4);
    close(b.fd);
    image = open_1("partly.v1");
    for (uint32_t i = 0; i < 32; i++) {
        expect_page(image, 7 * 32 + i, i == 0 || i == 8 || i == 31 ? 3 : i >= 8 && i < 16 ? 2 : 1);
        expect_page(image, 9 * 32 + i, i == 1 ? 4 : 0);
    }
    pcow_close(image);
}

/*
 * Bitmaps of random shape over each other, compared with a plain table; also in one read, which
 * joins runs.
 */
static void test_random_layers(void **state)
{
    static uint8_t model[2048], *all, *expected;
    uint64_t seed = random_seed();
    struct builder b = build("random.v1", 32768, 256, NULL);
    struct pcow_info info;
    pcow_image *image;
    uint64_t held = 0;

    (void)state;
    memset(model, 0, sizeof model);
    for (unsigned i = 1; i < 200; i++) {
        uint32_t cluster = (uint32_t)(random_next(&seed) % 96),
                 bitmap = (uint32_t)random_next(&seed) & 0xff;

        if (i % 40 == 0)
            put_super(&b, 32768, 256, NULL);
        put_cluster(&b, cluster, bitmap, (uint8_t)i);
        for (uint32_t p = 0; p < 8; p++)
            if (!bitmap || bitmap >> p & 1)
                model[cluster * 8 + p] = (uint8_t)i;
    }
    close(b.fd);
    image = open_1("random.v1");
    all = malloc(2048 * PAGE);
    expected = calloc(2048, PAGE);
    for (uint32_t page = 0; page < 2048; page++)
        if (model[page]) {
            fill(expected + page * PAGE, page, model[page]);
            held += PAGE;
        }
    MUST(pcow_read(image, 0, all, 2048 * PAGE, &error));
    assert_memory_equal(all, expected, 2048 * PAGE);
    pcow_get_info(image, &info);
    assert_int_equal(info.data_size, held);
    for (uint64_t offset = 0; offset < pcow_size(image);) {
        struct pcow_extent extent;

        MUST(pcow_get_extent(image, offset, pcow_size(image) - offset, &extent, &error));
        assert_int_equal(extent.present, model[offset / PAGE] != 0);
        if (extent.present) {
            int fd = open(extent.path, O_RDONLY);

            assert_int_equal(pread(fd, all, extent.length, (off_t)extent.file_offset),
                             extent.length);
            assert_memory_equal(all, expected + offset, extent.length);
            close(fd);
        }
        offset += extent.length;
    }
    free(all);
    free(expected);
    pcow_close(image);
}

/* Guest slabs at the end of the image that are not whole. */
static void test_last_slab_is_partial(void **state)
{
    struct builder b = build("odd.v1", 4096, 513, NULL);
    pcow_image *image;

    (void)state;
    put_cluster(&b, 511, 0, 1);
    put_cluster(&b, 512, 0, 2);
    close(b.fd);
    image = open_1("odd.v1");
    assert_int_equal(pcow_size(image), 513 * 4096);
    expect_page(image, 510, 0);
    expect_page(image, 511, 1);
    expect_page(image, 512, 2);
    pcow_close(image);

    struct pcow_create_options options = {.base = scratch("odd.v1")};

    MUST(pcow_create(scratch("odd.pcow"), &options, &error));
    image = must_open(scratch("odd.pcow"), 0);
    assert_int_equal(pcow_size(image), 4 * MIB);
    expect_page(image, 512, 2);
    expect_page(image, 513, 0);
    pcow_close(image);
}

/* Its snapshots have no names, so nothing can stand on one. */
static void test_no_image_on_a_snapshot_of_it(void **state)
{
    struct pcow_create_options options = {.base = scratch("a.v1"), .base_snapshot = "s"};
    struct builder b = build("a.v1", 65536, 64, NULL);
    pcow_image *image;

    (void)state;
    put_cluster(&b, 0, 0, 1);
    close(b.fd);
    MUST_FAIL(-EMEDIUMTYPE, pcow_create(scratch("top.pcow"), &options, &error));
    image = must_create(scratch("top.pcow"), 4 * MIB, 0, NULL);
    for (unsigned unsafe = 0; unsafe < 2; unsafe++)
        MUST_FAIL(-EMEDIUMTYPE,
                  pcow_rebase(image, scratch("a.v1"), "s", unsafe, NULL, NULL, &error));
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static void test_it_is_read_only(void **state)
{
    struct builder b = build("ro.v1", 65536, 64, NULL);
    pcow_image *image;
    char byte = 1;

    (void)state;
    close(b.fd);
    MUST_FAIL(-EINVAL, pcow_open(scratch("ro.v1"), PCOW_OPEN_FORMAT_1 | PCOW_OPEN_WRITE, NULL,
                                 &image, &error));
    MUST_FAIL(-EMEDIUMTYPE, pcow_open(scratch("ro.v1"), 0, NULL, &image, &error));
    image = open_1("ro.v1");
    MUST_FAIL(-EROFS, pcow_write(image, 0, &byte, 1, &error));
    MUST_FAIL(-EROFS, pcow_snapshot_create(image, "s", &error));
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)
        TEST(test_one_segment),
        TEST(test_cluster_size_in_kb),
        TEST(test_several_segments),
        TEST(test_a_full_segment_is_the_last),
        TEST(test_later_entries_and_snapshots_hide_earlier),
        TEST(test_partly_copied_clusters_fall_through),
        TEST(test_random_layers),
        TEST(test_last_slab_is_partial),
        TEST(test_no_image_on_a_snapshot_of_it),
        TEST(test_it_is_read_only),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
