/* SPDX-License-Identifier: BSD-3-Clause */
/* Chains of format 1 files, and images of today on them. */
#include "format1_files.h"

#include <string.h>
#include <unistd.h>

#include "format/format2.h"
#include "image/image.h"

static void test_base_chain(void **state)
{
    struct builder b = build("bottom.v1", 65536, 64, NULL);
    struct pcow_info info;
    pcow_image *image;
    uint8_t page[PAGE];

    (void)state;
    for (uint32_t i = 0; i < 8; i++)
        put_cluster(&b, i, 0, 1);
    close(b.fd);
    /* Another cluster size than its base. */
    b = build("middle.v1", 32768, 128, "bottom.v1");
    put_cluster(&b, 2, 0, 2);
    put_cluster(&b, 4, 0x1, 2);
    close(b.fd);
    b = build("top.v1", 65536, 64, "middle.v1");
    put_cluster(&b, 2, 0x2, 3);
    close(b.fd);
    image = open_1("top.v1");
    pcow_get_info(image, &info);
    assert_int_equal(info.chain_depth, 3);
    assert_true(info.has_base);
    assert_int_equal(info.base_format, 1);
    assert_string_equal(info.base_name, "middle.v1");
    for (uint32_t i = 0; i < 160; i++) {
        uint8_t expected = i == 33 ? 3 : (i >= 16 && i < 24) || i == 32 ? 2 : i < 128 ? 1 : 0;

        expect_page(image, i, expected);
    }
    pcow_close(image);

    /* As the base of an image of today. */
    struct pcow_create_options options = {.base = scratch("top.v1")};

    MUST(pcow_create(scratch("overlay.pcow"), &options, &error));
    image = must_open(scratch("overlay.pcow"), PCOW_OPEN_WRITE);
    pcow_get_info(image, &info);
    assert_int_equal(info.chain_depth, 4);
    assert_int_equal(info.base_format, 1);
    expect_page(image, 33, 3);
    expect_page(image, 100, 1);
    fill(page, 100, 9);
    MUST(pcow_write(image, 100 * PAGE, page, sizeof page, &error));
    expect_page(image, 100, 9);
    expect_page(image, 101, 1);
    pcow_close(image);
    must_be_clean(scratch("overlay.pcow"));
}

/* page of the third slab, which "short.v1" ends in the middle of */
#define FIRST 1024u
#define END (5 * 256u)                 /* of that file */

/*
 * A file of 8 MiB that holds all of its third slab; one of 5 MiB on it, which holds of that slab
 * what the bitmap of clusters says.
 */
static void build_short(uint32_t holds)
{
    struct builder b = build("long.v1", 65536, 128, NULL);

    for (uint32_t cluster = FIRST / 16; cluster < FIRST / 16 + 32; cluster++)
        put_cluster(&b, cluster, 0, 1);
    put_cluster(&b, 127, 0, 1);
    close(b.fd);
    b = build("short.v1", 65536, 80, "long.v1");
    for (uint32_t cluster = 0; cluster < 16; cluster++)
        if (holds >> cluster & 1)
            put_cluster(&b, FIRST / 16 + cluster, cluster == 2 ? 0xf : 0, 2);
    close(b.fd);
}

static uint8_t expected_on_short(uint32_t page, uint32_t holds)
{
    uint32_t cluster = (page - FIRST) / 16;

    if (page >= END)
        return 0;
    return holds >> cluster & 1 && (cluster != 2 || page % 16 < 4) ? 2 : 1;
}

/* The image itself, whose last slab is not whole, with fewer mappings than it has pieces. */
static void test_mapped_with_few_mappings(void **state)
{
    static uint8_t all[END * PAGE];
    struct pcow_map_stats stats;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    build_short(0x5555);
    image = open_1("short.v1");
    assert_int_equal(pcow_size(image), sizeof all);
    MUST(pcow_read(image, 0, all, sizeof all, &error));
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 3);
    assert_memory_equal(pcow_map_address(map), all, sizeof all);
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.vmas, 3);
    pcow_map_destroy(map);
    pcow_close(image);
}

/*
 * What a smaller base hides of its own base stays hidden, also where it ends in the middle of a
 * slab.
 */
static void test_end_of_a_smaller_base_in_a_slab(void **state)
{
    static const uint32_t holds[] = {0, 0x1, 0x8000, 0x4, 0xffff};
    static uint8_t all[8 * MIB];

    (void)state;
    for (unsigned i = 0; i < sizeof holds / sizeof *holds; i++) {
        struct pcow_create_options options = {.base = scratch("short.v1"), .virtual_size = 8 * MIB};
        struct pcow_extent extent;
        unsigned char *memory;
        pcow_image *image;
        pcow_map *map;

        build_short(holds[i]);
        unlink(scratch("top.pcow"));
        MUST(pcow_create(scratch("top.pcow"), &options, &error));
        image = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
        for (uint32_t page = FIRST; page < 2048; page++)
            expect_page(image, page, expected_on_short(page, holds[i]));
        /* All in one, where runs of pages meet the end. */
        MUST(pcow_read(image, 0, all, sizeof all, &error));
        for (uint32_t page = FIRST; page < 2048; page++)
            if (expected_on_short(page, holds[i])) {
                uint8_t bytes[PAGE];

                fill(bytes, page, expected_on_short(page, holds[i]));
                assert_memory_equal(all + page * PAGE, bytes, PAGE);
            } else {
                assert_int_equal(all[page * PAGE] | all[page * PAGE + PAGE - 1], 0);
            }
        MUST(pcow_get_extent(image, END * PAGE, (2048 - END) * PAGE, &extent, &error));
        assert_true(extent.zero);
        assert_int_equal(extent.length, (2048 - END) * PAGE);
        /* As memory, and what is copied for a store to a part of a cluster beyond the end. */
        MUST(pcow_map_create(image, NULL, &map, &error));
        memory = pcow_map_address(map);
        assert_memory_equal(memory, all, sizeof all);
        memory[(END + 100) * PAGE] = all[(END + 100) * PAGE] = 7;
        memory[(END - 1) * PAGE] = all[(END - 1) * PAGE] = 7;
        assert_memory_equal(memory, all, sizeof all);
        pcow_map_destroy(map);
        assert_reads(image, 0, all, sizeof all);
        /* Another base must not change what is seen. */
        MUST(pcow_rebase(image, scratch("long.v1"), NULL, false, NULL, NULL, &error));
        assert_reads(image, 0, all, sizeof all);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
    }
}

/* A file of format 1 has no uuid: a record that nobody has compared says nothing of it. */
static void test_forged_record(void **state)
{
    struct builder b = build("victim.v1", 65536, 64, NULL);
    struct pcow_create_options options = {.base = scratch("victim.v1")};
    struct base_record record;
    pcow_image *image;

    (void)state;
    close(b.fd);
    MUST(pcow_create(scratch("hostile"), &options, &error));
    image = must_open(scratch("hostile"), PCOW_OPEN_WRITE);
    record = *image_base_record(image);
    record.flags |= BASE_UNCHECKED;
    record.crc = base_record_crc(&record);
    MUST(header_set_base(image, &record, &error));
    pcow_close(image);
    MUST_FAIL(-ESTALE, pcow_open(scratch("hostile"), 0, NULL, &image, &error));
    image = must_open(scratch("hostile"), PCOW_OPEN_WRITE | PCOW_OPEN_NO_BASE);
    MUST(pcow_rebase(image, scratch("victim.v1"), NULL, true, NULL, NULL, &error));
    pcow_close(image);
    pcow_close(must_open(scratch("hostile"), 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)
        TEST(test_base_chain),
        TEST(test_mapped_with_few_mappings),
        TEST(test_end_of_a_smaller_base_in_a_slab),
        TEST(test_forged_record),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
