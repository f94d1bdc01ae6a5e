/* SPDX-License-Identifier: BSD-3-Clause */
/* A snapshot that is made in steps, while the guest runs on. */
#include "support.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "image/image.h"
#include "image/lock.h"
#include "monitor/monitor.h"
#include "operations/operations.h"
#include "persist/observer.h"

#define SIZE (8 * MIB)

/* Counts requests to write to the medium, and lets them fail. */
struct medium {
    struct observer observer;
    unsigned requests;
    bool fails;
};

static struct medium medium;
static pcow_image *image;
static pcow_map *map;
static volatile unsigned char *memory;
static uint64_t token;                         /* of the last prepare() */

static int look(struct observer *observer, const struct observation *observation)
{
    struct medium *seen = (struct medium *)observer;

    if (observation->what != OBSERVED_SYNC && observation->what != OBSERVED_MSYNC)
        return 0;
    seen->requests++;
    return seen->fails ? -EIO : 0;
}

static void begin(enum pcow_persistence persistence)
{
    const struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};

    unlink(scratch("t"));
    medium = (struct medium){.observer = {.persistence = persistence, .look = look}};
    pcow_close(must_create(scratch("t"), SIZE, 0, NULL));
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &medium.observer, &image, &error));
    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
}

static void end(void)
{
    struct pcow_check_result result;

    pcow_map_destroy(map);
    pcow_close(image);
    MUST(pcow_check(scratch("t"), 0, NULL, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
}

static void flush_map(void)
{
    MUST(pcow_map_flush(map, 0, SIZE, &error));
}

static void prepare(const char *name)
{
    unsigned calls = 0;
    int ret;

    while ((ret = pcow_snapshot_prepare(image, name, 7, 8, &token, NULL)) == PCOW_FLUSH_FIRST) {
        assert_true(++calls < 3);
        flush_map();
    }
    assert_int_equal(ret, 0);
}

static uint32_t finish(void)
{
    unsigned calls = 0;
    uint32_t id;
    int ret;

    while ((ret = pcow_snapshot_finish(image, token, &id, NULL)) == PCOW_FLUSH_FIRST) {
        assert_true(++calls < 3);
        flush_map();
    }
    assert_int_equal(ret, 0);
    return id;
}

static size_t count_snapshots(void)
{
    struct pcow_snapshot *list;
    size_t count;

    MUST(pcow_snapshot_list(image, &list, &count, &error));
    free(list);
    return count;
}

static void expect_byte(const char *snapshot, uint64_t offset, unsigned char value)
{
    pcow_image *view;
    unsigned char byte;

    MUST(pcow_open(scratch("t"), 0, snapshot, &view, &error));
    MUST(pcow_read(view, offset, &byte, 1, &error));
    assert_int_equal(byte, value);
    pcow_close(view);
}

static void check_steps(enum pcow_persistence persistence)
{
    struct pcow_snapshot *list;
    unsigned requests;
    pcow_image *view;
    size_t count;
    uint32_t id;

    begin(persistence);
    memory[0] = 1;
    prepare("s");
    memory[4096] = 2;
    requests = medium.requests;
    MUST(pcow_snapshot_freeze(image, token, &error));
    /* The guest does not wait for the medium. */
    assert_int_equal(medium.requests, requests);
    memory[0] = 3;
    memory[8192] = 4;
    /* It is none yet, for nobody. */
    assert_int_equal(count_snapshots(), 0);
    MUST_FAIL(-ENOENT, pcow_open(scratch("t"), 0, "s", &view, &error));
    id = finish();
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 1);
    assert_int_equal(list[0].id, id);
    assert_string_equal(list[0].name, "s");
    assert_int_equal(list[0].date_seconds, 7);
    assert_int_equal(list[0].date_nanoseconds, 8);
    free(list);
    expect_byte("s", 0, 1);
    expect_byte("s", 4096, 2);
    expect_byte("s", 8192, 0);
    MUST_FAIL(-EEXIST, pcow_snapshot_prepare(image, "s", 0, 0, &token, &error));
    MUST_FAIL(-EINVAL, pcow_snapshot_prepare(image, "", 0, 0, &token, &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
    MUST(pcow_snapshot_revert(image, "s", &error));
    assert_int_equal(memory[0], 1);
    assert_int_equal(memory[8192], 0);
    MUST(pcow_snapshot_delete(image, "s", NULL, &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_finish(image, token, NULL, &error));
    end();
}

static void test_each_step(void **state)
{
    (void)state;
    check_steps(PCOW_PERSISTENCE_PAGE_CACHE);
    check_steps(PCOW_PERSISTENCE_PMEM);
    check_steps(PCOW_PERSISTENCE_VOLATILE);
}

/*
 * The thread of the map, which copies the rest of a slab that the guest has stored to all over, may
 * wait for the medium, and who freezes would wait for it.
 */
static void test_nothing_is_under_way(void **state)
{
    unsigned requests;

    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memset((void *)(uintptr_t)memory, 1, SIZE);
    MUST(pcow_snapshot_create(image, "base", &error));
    usleep(200000);
    prepare("s");
    for (unsigned i = 0; i < 300; i++)
        memory[i * 197 % 512 * 4096] = 2;
    requests = medium.requests;
    usleep(300000);
    assert_int_equal(medium.requests, requests);
    MUST(pcow_snapshot_freeze(image, token, &error));
    finish();
    expect_byte("s", 0, 2);
    end();
}

static uint64_t completed(void)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats.slabs_completed;
}

/* Whoever has prepared it does not come: the thread goes on after a minute, and so does he. */
static void test_prepared_long_ago(void **state)
{
    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memset((void *)(uintptr_t)memory, 1, SIZE);
    MUST(pcow_snapshot_create(image, "base", &error));
    usleep(200000);
    prepare("s");
    for (unsigned i = 0; i < 300; i++)
        memory[i * 197 % 512 * 4096] = 2;
    usleep(300000);
    assert_int_equal(completed(), 0);
    turnstile_hold(map);
    image->making.prepared_ns -= 61000000000u;
    turnstile_release(map);
    for (unsigned i = 0; i < 500 && completed() == 0; i++)
        usleep(10000);
    assert_int_equal(completed(), 1);
    MUST(pcow_snapshot_freeze(image, token, &error));
    finish();
    expect_byte("s", 0, 2);
    /* And it rests again. */
    memset((void *)(uintptr_t)memory, 3, SIZE);
    MUST(pcow_snapshot_create(image, "again", &error));
    usleep(200000);
    prepare("t");
    for (unsigned i = 0; i < 300; i++)
        memory[i * 197 % 512 * 4096] = 4;
    usleep(300000);
    assert_int_equal(completed(), 1);
    end();
}

/* What is prepared is forgotten, and its record is used again. */
static void test_another_operation_after_prepare(void **state)
{
    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memory[0] = 1;
    prepare("s");
    MUST(pcow_snapshot_create(image, "other", &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
    prepare("s");
    MUST(pcow_snapshot_rename(image, "other", "renamed", &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
    prepare("a");
    prepare("b");
    MUST(pcow_snapshot_freeze(image, token, &error));
    finish();
    assert_int_equal(count_snapshots(), 2);
    expect_byte("b", 0, 1);
    prepare("s");
    MUST(pcow_snapshot_revert(image, "renamed", &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
    for (unsigned i = 0; i < 300; i++)
        prepare(i % 2 ? "x" : "y");
    assert_true(word_value(image->header.layer_slots) < 10);
    end();
}

/* What is frozen becomes a snapshot with it. */
static void test_another_operation_after_freeze(void **state)
{
    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memory[0] = 1;
    MUST(pcow_snapshot_create(image, "first", &error));
    prepare("s");
    MUST(pcow_snapshot_freeze(image, token, &error));
    memory[0] = 2;
    MUST(pcow_snapshot_delete(image, "first", NULL, &error));
    assert_int_equal(count_snapshots(), 1);
    expect_byte("s", 0, 1);
    finish();
    prepare("t");
    MUST(pcow_snapshot_freeze(image, token, &error));
    MUST(pcow_snapshot_create(image, "u", &error));
    assert_int_equal(count_snapshots(), 3);
    finish();
    end();
}

/* There is none, the guest has what it stored, and nothing is left of it. */
static void test_abandoned(void **state)
{
    static const unsigned char expected[] = {5, 1, 7, 0};
    pcow_image *view;

    (void)state;
    for (unsigned marked = 0; marked < 2; marked++) {
        begin(PCOW_PERSISTENCE_PAGE_CACHE);
        memory[0] = 1;
        memory[4096] = 1;
        prepare("s");
        MUST(pcow_snapshot_abandon(image, token, &error));
        MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
        prepare("s");
        MUST(pcow_snapshot_freeze(image, token, &error));
        memory[0] = 5;
        if (marked) {
            flush_map();
            assert_int_equal(pcow_snapshot_finish(image, token, NULL, NULL), PCOW_FLUSH_FIRST);
            assert_int_equal(count_snapshots(), 0);
            /* In the file it is one, but nobody can make an image on it. */
            MUST_FAIL(-EBUSY, pcow_open(scratch("t"), 0, "s", &view, &error));
        }
        MUST(pcow_snapshot_abandon(image, token, &error));
        memory[8192] = 7;
        assert_int_equal(count_snapshots(), 0);
        assert_int_equal(image->layer_count, 1);
        for (unsigned page = 0; page < 4; page++)
            assert_int_equal(memory[page * 4096], expected[page]);
        end();
        for (unsigned page = 0; page < 4; page++)
            expect_byte(NULL, page * 4096, expected[page]);
    }
}

/* Each step is about its own beginning. */
static void test_two_at_once(void **state)
{
    uint64_t first, second;
    uint32_t id;

    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memory[0] = 1;
    /* Not by the snapshot that another one has made of the same layer. */
    prepare("a");
    first = token;
    MUST(pcow_snapshot_create(image, "e", &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, first, &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_finish(image, first, &id, &error));
    MUST(pcow_snapshot_delete(image, "e", NULL, &error));
    prepare("a");
    first = token;
    prepare("b");
    second = token;
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, first, &error));
    MUST(pcow_snapshot_abandon(image, first, &error));
    MUST(pcow_snapshot_freeze(image, second, &error));
    memory[0] = 2;
    MUST(pcow_snapshot_abandon(image, first, &error));
    /* What another operation fails to finish is not his to give up. */
    medium.fails = true;
    MUST_FAIL(-EIO, pcow_snapshot_create(image, "c", &error));
    medium.fails = false;
    MUST(pcow_snapshot_create(image, "d", &error));
    MUST(pcow_snapshot_finish(image, second, &id, &error));
    expect_byte("b", 0, 1);
    expect_byte("d", 0, 2);
    MUST(pcow_snapshot_delete(image, "d", NULL, &error));
    MUST(pcow_snapshot_finish(image, second, &id, &error));
    MUST(pcow_snapshot_delete(image, "b", NULL, &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_finish(image, second, &id, &error));
    end();
}

/*
 * Somebody has the tree locked, as who loads it: the guest does not stand for that; and what is
 * given up meanwhile is none, later on either.
 */
static void test_tree_that_is_read(void **state)
{
    struct file other;

    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memory[0] = 1;
    prepare("s");
    MUST(file_open(&other, AT_FDCWD, scratch("t"), scratch("t"), FILE_FORCE_SHARE, NULL, &error));
    MUST(lock_tree(&other, false, &error));
    MUST(pcow_snapshot_freeze(image, token, &error));
    memory[0] = 2;
    assert_int_equal(pcow_snapshot_finish(image, token, NULL, NULL), PCOW_FLUSH_FIRST);
    MUST_FAIL(-EBUSY, pcow_snapshot_abandon(image, token, &error));
    file_close(&other);
    MUST_FAIL(-ESTALE, pcow_snapshot_finish(image, token, NULL, &error));
    MUST(pcow_snapshot_create(image, "t", &error));
    assert_int_equal(count_snapshots(), 1);
    assert_int_equal(image->layer_count, 2);
    expect_byte("t", 0, 2);
    end();
}

/* In the file it is one, and the image is closed before anybody was told. */
static void test_closed_in_between(void **state)
{
    (void)state;
    for (unsigned given_up = 0; given_up < 2; given_up++) {
        struct file other;

        begin(PCOW_PERSISTENCE_PAGE_CACHE);
        memory[0] = 1;
        prepare("s");
        MUST(pcow_snapshot_freeze(image, token, &error));
        memory[0] = 2;
        assert_int_equal(pcow_snapshot_finish(image, token, NULL, NULL), PCOW_FLUSH_FIRST);
        flush_map();
        assert_int_equal(pcow_snapshot_finish(image, token, NULL, NULL), PCOW_FLUSH_FIRST);
        if (given_up) {
            MUST(file_open(&other, AT_FDCWD, scratch("t"), scratch("t"), FILE_FORCE_SHARE, NULL,
                           &error));
            MUST(lock_tree(&other, false, &error));
            MUST_FAIL(-EBUSY, pcow_snapshot_abandon(image, token, &error));
            file_close(&other);
        }
        end();
        MUST(pcow_open(scratch("t"), 0, NULL, &image, &error));
        assert_int_equal(count_snapshots(), 0);
        assert_int_equal(image->layer_count, 1);
        pcow_close(image);
        expect_byte(NULL, 0, 2);
    }
}

static void test_without_a_map(void **state)
{
    (void)state;
    for (unsigned step = 0; step < 2; step++) {
        begin(PCOW_PERSISTENCE_PMEM);
        memory[0] = 1;
        prepare("s");
        if (step == 0)
            pcow_map_destroy(map);
        MUST(pcow_snapshot_freeze(image, token, &error));
        if (step == 1)
            pcow_map_destroy(map);
        map = NULL;
        medium.requests = 0;
        MUST(pcow_snapshot_finish(image, token, NULL, &error));
        assert_true(step == 0 || medium.requests > 0);
        expect_byte("s", 0, 1);
        end();
    }
}

/* It is another layer in all but its id. */
static void test_resize_in_between(void **state)
{
    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    pcow_map_destroy(map);
    map = NULL;
    prepare("s");
    MUST(pcow_resize(image, 2 * SIZE, false, &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
    prepare("s");
    MUST(pcow_snapshot_freeze(image, token, &error));
    finish();
    end();
}

/* As when the disk fails: nobody sees a snapshot, and the next writer has what the guest stored. */
static void test_medium_that_fails(void **state)
{
    (void)state;
    begin(PCOW_PERSISTENCE_PAGE_CACHE);
    memory[0] = 1;
    medium.fails = true;
    assert_int_equal(pcow_snapshot_prepare(image, "s", 0, 0, &token, NULL), PCOW_FLUSH_FIRST);
    MUST_FAIL(-EIO, pcow_map_flush(map, 0, SIZE, &error));
    MUST_FAIL(-ESTALE, pcow_snapshot_freeze(image, token, &error));
    MUST(pcow_snapshot_abandon(image, token, &error));
    medium.fails = false;
    prepare("s");
    MUST(pcow_snapshot_freeze(image, token, &error));
    memory[0] = 2;
    medium.fails = true;
    assert_int_equal(pcow_snapshot_finish(image, token, NULL, NULL), PCOW_FLUSH_FIRST);
    MUST_FAIL(-EIO, pcow_map_flush(map, 0, SIZE, &error));
    assert_int_equal(pcow_snapshot_finish(image, token, NULL, NULL), PCOW_FLUSH_FIRST);
    MUST_FAIL(-EIO, pcow_snapshot_abandon(image, token, &error));
    MUST_FAIL(-EIO, pcow_snapshot_prepare(image, "u", 0, 0, &token, &error));
    MUST_FAIL(-EIO, pcow_snapshot_create(image, "u", &error));
    assert_int_equal(count_snapshots(), 0);
    medium.fails = false;
    memory[4096] = 3;
    MUST(pcow_snapshot_create(image, "t", &error));
    end();
    MUST(pcow_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &image, &error));
    assert_int_equal(image->layer_count, 2);
    pcow_close(image);
    expect_byte("t", 0, 2);
    expect_byte(NULL, 4096, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_each_step, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_nothing_is_under_way, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_prepared_long_ago, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_another_operation_after_prepare, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_another_operation_after_freeze, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_abandoned, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_two_at_once, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_tree_that_is_read, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_closed_in_between, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_without_a_map, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_resize_in_between, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_medium_that_fails, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
