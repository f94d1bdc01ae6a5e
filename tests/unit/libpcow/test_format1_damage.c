/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Format 1 files that are damaged, or made to do harm: what is refused, and what is not believed.
 */
#include "format1_files.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void test_names_of_bases(void **state)
{
    static const char *const path[] = {"/etc/passwd", "../b.v1", "./b.v1", ".", "..", "pool/b.v1"};
    pcow_image *image;

    (void)state;
    for (size_t i = 0; i < sizeof path / sizeof path[0]; i++) {
        struct pcow_info info;

        close(build("named.v1", 65536, 64, path[i]).fd);
        expect_refused("named.v1", -EBADMSG, "same directory");
        /* What the image itself holds can be looked at. */
        image = must_open(scratch("named.v1"), PCOW_OPEN_FORMAT_1 | PCOW_OPEN_NO_BASE);
        pcow_get_info(image, &info);
        assert_string_equal(info.base_name, path[i]);
        pcow_close(image);
    }
    close(build("named.v1", 65536, 64, "012345678901234567890123456789012345678901234567").fd);
    expect_refused("named.v1", -EBADMSG, "48 bytes");
    close(build("named.v1", 65536, 64, "missing.v1").fd);
    expect_refused("named.v1", -ENOENT, "missing.v1");
    close(build("named.v1", 65536, 64, "named.v1").fd);
    expect_refused("named.v1", -ELOOP, "chain");
    assert_int_equal(symlink("named.v1", scratch("link.v1")), 0);
    close(build("named.v1", 65536, 64, "link.v1").fd);
    expect_refused("named.v1", -ELOOP, "symbolic link");
}

/* A healthy file with one segment and one snapshot, to be damaged in one place. */
static struct builder healthy(void)
{
    struct builder b = build("bad.v1", 65536, 64, NULL);

    put_cluster(&b, 3, 0, 1);
    put_cluster(&b, 4, 0x8001, 1);
    put_super(&b, 65536, 64, NULL);
    put_cluster(&b, 5, 0, 1);
    return b;
}

static void test_damage(void **state)
{
    enum { META = 65536, SNAPSHOT = 4 * 65536 };
    static const struct {
        uint64_t offset;
        uint32_t value;
        const char *says;
    } damage[] = {
        {0, 0, "cluster size"},
        {0, 6, "cluster size"},                     /* 6 KB: no multiple of a page */
        {0, 65537, "cluster size"},
        {0, UINT32_MAX, "cluster size"},
        {4, 0, "no clusters"},
        {4, UINT32_MAX, "16 TiB"},
        {8, 1, "segment 1"},
        {8, UINT32_MAX, "end of file"},
        {META, 8185, "8184"},                       /* more than (65536 - 64) / 8 */
        {META, UINT32_MAX, "8184"},
        {META + 64, 64, "guest"},                   /* the guest has clusters 0 to 63 */
        {META + 64, UINT32_MAX, "lost its guest address"},
        {META + 72 + 4, 0x10000, "pages"},          /* page 16 of 16 */
        {SNAPSHOT, 32768, "snapshot 1"},
        {SNAPSHOT + 4, 65, "snapshot 1"},
        {SNAPSHOT + 8, 1, "segment"},
        {SNAPSHOT + META, 2, "end of file"},        /* the second cluster is not there */
    };

    (void)state;
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++) {
        struct builder b = healthy();

        put32(&b, damage[i].offset, damage[i].value);
        close(b.fd);
        expect_refused("bad.v1", -EBADMSG, damage[i].says);
    }
}

static void test_a_segment_that_is_not_full(void **state)
{
    struct builder b = build("gap.v1", 4096, 1024, NULL);

    (void)state;
    for (uint32_t i = 0; i < 600; i++)
        put_cluster(&b, i, 0, 1);
    put32(&b, 4096, 503);
    close(b.fd);
    expect_refused("gap.v1", -EBADMSG, "fewer than 504");
}

static void test_files_that_end_early(void **state)
{
    struct builder b = healthy();
    pcow_image *image;

    (void)state;
    close(b.fd);
    for (uint64_t size = 0; size < b.end; size += size % 65536 < 128 ? 16 : 16384 - 128) {
        struct pcow_error error = {0};
        int ret;

        b = healthy();
        assert_int_equal(ftruncate(b.fd, (off_t)size), 0);
        close(b.fd);
        ret = pcow_open(scratch("bad.v1"), PCOW_OPEN_FORMAT_1, NULL, &image, &error);
        /*
         * Before the magic; then damaged; but cut at the snapshot it is what the prototype calls a
         * rollback.
         */
        if (size < 64) {
            assert_int_equal(ret, -EMEDIUMTYPE);
        } else if (size >= 4 * 65536 && size < 4 * 65536 + 64) {
            assert_int_equal(ret, 0);
            expect_page(image, 4 * 16 + 15, 1);
            expect_page(image, 5 * 16, 0);
            pcow_close(image);
        } else {
            assert_int_equal(ret, -EBADMSG);
            assert_non_null(strstr(error.message, "end of file"));
        }
    }
}

static void test_bitmaps_need_small_clusters(void **state)
{
    struct builder b = build("large.v1", 262144, 16, NULL);
    pcow_image *image;

    (void)state;
    put_cluster(&b, 1, 0, 1);
    close(b.fd);
    image = open_1("large.v1");
    expect_page(image, 64 + 63, 1);
    pcow_close(image);
    b = build("large.v1", 262144, 16, NULL);
    put_cluster(&b, 1, 1, 1);
    close(b.fd);
    expect_refused("large.v1", -EBADMSG, "pages");
}

/*
 * Sparse and hostile: a terabyte of entries that all say the same must neither take the memory nor
 * the day.
 */
static void test_entries_in_holes(void **state)
{
    struct builder b = build("sparse.v1", 131072, 1 << 20, NULL);
    uint64_t segment = UINT64_C(131072) * (1 + 16376);
    struct pcow_info info;
    pcow_image *image;

    (void)state;
    for (uint32_t i = 0; i < 64; i++)
        put32(&b, 131072 + segment * i, 16376);
    put32(&b, 8, 63);
    assert_int_equal(ftruncate(b.fd, (off_t)(131072 + segment * 64)), 0);
    close(b.fd);
    image = open_1("sparse.v1");
    pcow_get_info(image, &info);
    assert_int_equal(info.data_size, 131072);
    expect_page(image, 0, 0);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)
        TEST(test_names_of_bases),
        TEST(test_damage),
        TEST(test_a_segment_that_is_not_full),
        TEST(test_files_that_end_early),
        TEST(test_bitmaps_need_small_clusters),
        TEST(test_entries_in_holes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
