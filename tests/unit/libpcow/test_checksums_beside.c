/* SPDX-License-Identifier: BSD-3-Clause */
/* Checksums of data that are made beside a writer. */
#include "summed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* Those of what is final, without VM state; the guest stores, and none of it is slower or wrong. */
static void test_beside_a_writer(void **state)
{
    pcow_image *writer, *reader;
    pcow_map *map;
    uint8_t *memory;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    map = must_map_by(writer, PCOW_ENGINE_SIGNAL, 0);
    memory = pcow_map_address(map);
    checksum_beside("one", NULL, NULL);
    memory[2 * PCOW_SLAB_SIZE + 3 * PAGE] = 0x71;
    memory[7 * PCOW_SLAB_SIZE] = 0x72;
    checksum_beside("two", NULL, NULL);
    checksum_beside("two", NULL, NULL);
    reader = open_at("two");
    /* in use */
    MUST_FAIL(-EBUSY, pcow_snapshot_delete(writer, "two", NULL, &error));
    pcow_close(reader);
    reader = must_open(IMAGE, PCOW_OPEN_FORCE_SHARE);
    MUST_FAIL(-EINVAL, pcow_checksum_beside_writer(reader, 0, NULL, NULL, NULL, &error));
    pcow_close(reader);
    MUST_FAIL(-EINVAL, pcow_checksum_beside_writer(writer, 0, NULL, NULL, NULL, &error));
    pcow_map_destroy(map);
    pcow_close(writer);
    expect_verified(ONE + TWO - PCOW_SLAB_SIZE, PCOW_SLAB_SIZE + ACTIVE + PAGE);
}

/* That all were made is noted in the file alone, and the writer keeps it when it closes. */
static void test_gone_beside_a_writer(void **state)
{
    static uint8_t kept[PAGE], zeros[PAGE];
    pcow_image *writer;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    checksum_beside("two", NULL, NULL);
    must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), false);
    for (unsigned closed = 0; closed < 2; closed++) {
        must_transfer(IMAGE, zeros, sizeof zeros, datasum_offset(0), true);
        assert_int_equal(verify_shared().corruptions, 8);
        must_transfer(IMAGE, kept, sizeof kept, datasum_offset(0), true);
        assert_int_equal(verify_shared().corruptions, 0);
        if (closed)
            break;
        store(writer, 0, 0, 0x33);
        MUST(pcow_snapshot_rename(writer, "two", "2", &error));
        pcow_close(writer);
    }
    must_be_clean(IMAGE);
    /* Of the image of nobody, too: the mirror of the page is brought up to date. */
    checksum_beside("one", NULL, NULL);
    must_be_clean(IMAGE);
}

/*
 * The writer has known of none when it opened the image: it looks before it changes what was a
 * snapshot's.
 */
static void test_writer_looks_for_them(void **state)
{
    pcow_image *writer;
    struct pcow_data_result result;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    checksum_beside("two", NULL, NULL);
    /* Merged into "two", given back, and taken by others. */
    MUST(pcow_snapshot_delete(writer, "one", NULL, &error));
    assert_int_equal(verify_shared().corruptions, 0);
    MUST(pcow_snapshot_revert(writer, "two", &error));
    MUST(pcow_snapshot_create(writer, "three", &error));
    MUST(pcow_snapshot_delete(writer, "two", NULL, &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(writer, slab, slab + 7, 0x61);
    checksum_beside("three", NULL, NULL);
    MUST(pcow_snapshot_delete(writer, "three", NULL, &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        store(writer, slab, slab + 9, 0x62);
    pcow_close(writer);
    result = verify();
    if (result.corruptions)
        fail_msg("%s", findings.text);
    assert_int_equal(result.verified, 0);
    must_be_clean(IMAGE);
}

static int ask_another(void *opaque, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    MUST_FAIL(-EBUSY, pcow_checksum_beside_writer(opaque, 0, NULL, NULL, NULL, &error));
    return 0;
}

struct deleting {
    pcow_image *writer;
    unsigned calls, at;
};

static int delete_one(void *opaque, uint64_t done, uint64_t total)
{
    struct deleting *deleting = opaque;

    assert_true(done <= total);
    if (++deleting->calls == deleting->at)
        MUST(pcow_snapshot_delete(deleting->writer, "one", NULL, &error));
    return 0;
}

/* What was hashed, and is another layer's before that is published, gets none. */
static void test_tree_changes_beside_it(void **state)
{
    (void)state;
    for (unsigned at = 1; at <= 8; at++) {
        struct deleting deleting = {.at = at};

        unlink(IMAGE);
        make_image();
        deleting.writer = must_open(IMAGE, PCOW_OPEN_WRITE);
        checksum_beside("two", delete_one, &deleting);
        assert_int_equal(deleting.calls, 8);
        for (unsigned slab = 0; slab < SLABS; slab++)
            store(deleting.writer, slab, slab + 7, 0x61);
        pcow_close(deleting.writer);
        if (verify().corruptions)
            fail_msg("deleted at slab %u: %s", at, findings.text);
        must_be_clean(IMAGE);
    }
}

/* Of makers there is one at a time: the older one would not know of the other's. */
static void test_one_maker_at_a_time(void **state)
{
    pcow_image *writer, *first, *second;

    (void)state;
    make_image();
    writer = must_open(IMAGE, PCOW_OPEN_WRITE);
    first = open_at("two");
    MUST(pcow_snapshot_delete(writer, "one", NULL, &error));
    second = open_at("two");
    MUST(pcow_checksum_beside_writer(second, 0, NULL, ask_another, first, &error));
    MUST(pcow_checksum_beside_writer(first, 0, NULL, NULL, NULL, &error));
    pcow_close(first);
    pcow_close(second);
    pcow_close(writer);
    if (verify().corruptions)
        fail_msg("%s", findings.text);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_gone_beside_a_writer),
        TEST(test_beside_a_writer),
        TEST(test_writer_looks_for_them),
        TEST(test_tree_changes_beside_it),
        TEST(test_one_maker_at_a_time),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
