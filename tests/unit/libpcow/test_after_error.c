/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An operation failed in the middle, wherever it can, and the same process goes on with the image.
 */
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "image/image.h"
#include "monitor/monitor.h"
#include "operations/operations.h"
#include "persist/observer.h"

/* Lets the call number "left" fail, and all later ones work. */
struct faulty {
    struct observer observer;
    int left;
};

static int look(struct observer *observer, const struct observation *observation)
{
    struct faulty *faulty = (struct faulty *)observer;

    if (observation->what == OBSERVED_STORE || observation->what == OBSERVED_COPY
        || observation->what == OBSERVED_FLUSH || observation->what == OBSERVED_FENCE
        || observation->what == OBSERVED_OPEN || observation->what == OBSERVED_CLOSE)
        return 0;
    return faulty->left-- == 0 ? -EIO : 0;
}

/*
 * Three snapshots, "b" with a branch and a VM state; in class page-cache, where every flush may
 * fail.
 */
static pcow_image *faulty_tree(struct faulty *faulty)
{
    pcow_image *image;

    unlink(scratch("t"));
    *faulty = (struct faulty){
        .observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look}, .left = -1};
    pcow_close(must_create(scratch("t"), 8 * MIB, 0, NULL));
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &faulty->observer, &image, &error));
    write_text(image, 0, "a");
    MUST(pcow_snapshot_create(image, "a", &error));
    write_text(image, 0, "b");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(pcow_snapshot_write_state(image, "b", 0, "state", 6, &error));
    MUST(pcow_snapshot_set_state_size(image, "b", 6, &error));
    write_text(image, 4096, "c");
    MUST(pcow_snapshot_create(image, "c", &error));
    MUST(pcow_snapshot_revert(image, "b", &error));
    write_text(image, 8192, "d");
    return image;
}

/*
 * A rename that failed wherever it can; the snapshot is deleted by the same process. It must not
 * come back.
 */
static void test_failed_rename_then_delete(void **state)
{
    struct faulty faulty;
    bool reached_end = false;

    (void)state;
    for (int fault = 0; !reached_end; fault++) {
        pcow_image *image = faulty_tree(&faulty);
        struct pcow_snapshot *list;
        size_t count;

        faulty.left = fault;
        (void)pcow_snapshot_rename(image, "c", "renamed", NULL);
        reached_end = faulty.left >= 0;
        faulty.left = -1;
        if (pcow_snapshot_delete(image, "renamed", NULL, NULL))
            MUST(pcow_snapshot_delete(image, "c", NULL, &error));
        pcow_close(image);
        must_be_clean(scratch("t"));
        image = must_open(scratch("t"), PCOW_OPEN_WRITE);
        MUST(pcow_snapshot_list(image, &list, &count, &error));
        assert_int_equal(count, 2);
        assert_null(find_snapshot(list, count, "c"));
        assert_null(find_snapshot(list, count, "renamed"));
        free(list);
        pcow_close(image);
        assert_true(fault < 1000);
    }
}

/* A delete that failed wherever it can: the next writer finishes it, and nothing of it stays. */
static void test_failed_delete(void **state)
{
    struct faulty faulty;
    bool reached_end = false;

    (void)state;
    for (int fault = 0; !reached_end; fault++) {
        pcow_image *image = faulty_tree(&faulty);
        int ret;

        faulty.left = fault;
        ret = pcow_snapshot_delete(image, "b", NULL, NULL);
        reached_end = faulty.left >= 0;
        assert_true(!reached_end || !ret);
        faulty.left = -1;
        pcow_close(image);
        image = must_open(scratch("t"), PCOW_OPEN_WRITE);
        (void)pcow_snapshot_delete(image, "b", NULL, NULL);
        assert_reads(image, 0, "b", 2);
        assert_reads(image, 8192, "d", 2);
        pcow_close(image);
        must_be_clean(scratch("t"));
        assert_true(fault < 1000);
    }
}

/*
 * What the kernel could not write is told to one commit only; if that was not the user's own flush,
 * his next one has to say it.
 */
static void test_flush_tells_what_another_commit_met(void **state)
{
    struct faulty faulty;
    pcow_image *image = faulty_tree(&faulty);

    (void)state;
    MUST(pcow_flush(image, &error));
    write_text(image, 16384, "lost");
    faulty.left = 0;
    assert_int_equal(file_commit(&image->file), -EIO);
    faulty.left = -1;
    MUST_FAIL(-EIO, pcow_flush(image, &error));
    MUST(pcow_flush(image, &error));
    pcow_close(image);
}

/*
 * A create that failed after it was done in the file: the next operation finishes it, or the image
 * would not open again.
 */
static void test_failed_create_then_another(void **state)
{
    struct faulty faulty;
    bool reached_end = false;

    (void)state;
    for (int fault = 0; !reached_end; fault++) {
        pcow_image *image = faulty_tree(&faulty);
        struct pcow_snapshot *list;
        bool was_there;
        size_t count;

        faulty.left = fault;
        (void)pcow_snapshot_create(image, "first", NULL);
        reached_end = faulty.left >= 0;
        faulty.left = -1;
        MUST(pcow_snapshot_list(image, &list, &count, &error));
        was_there = find_snapshot(list, count, "first");
        free(list);
        write_text(image, 8192, "e");
        MUST(pcow_snapshot_create(image, "second", &error));
        write_text(image, 8192, "f");
        pcow_close(image);
        must_be_clean(scratch("t"));
        image = must_open(scratch("t"), PCOW_OPEN_WRITE);
        MUST(pcow_snapshot_list(image, &list, &count, &error));
        assert_true(find_snapshot(list, count, "second"));
        assert_true(!was_there || find_snapshot(list, count, "first"));
        free(list);
        assert_reads(image, 8192, "f", 2);
        MUST(pcow_snapshot_revert(image, was_there ? "first" : "second", &error));
        assert_reads(image, 8192, was_there ? "d" : "e", 2);
        pcow_close(image);
        assert_true(fault < 1000);
    }
}

/* The same, and somebody makes an image on the snapshot, if there is one. */
static void test_failed_create_then_a_child(void **state)
{
    bool reached_end = false;
    struct faulty faulty;

    (void)state;
    for (int fault = 0; !reached_end; fault++) {
        struct pcow_create_options options = {.base = scratch("t"), .base_snapshot = "first"};
        pcow_image *image = faulty_tree(&faulty);
        int created;

        faulty.left = fault;
        created = pcow_snapshot_create(image, "first", NULL);
        reached_end = faulty.left >= 0;
        faulty.left = -1;
        unlink(scratch("top"));
        assert_int_equal(pcow_create(scratch("top"), &options, NULL), created ? -ENOENT : 0);
        if (!created) {
            MUST_FAIL(-EBUSY, pcow_snapshot_delete(image, "first", NULL, &error));
            pcow_close(must_open(scratch("top"), 0));
            unlink(scratch("top"));
            MUST(pcow_snapshot_delete(image, "first", NULL, &error));
        }
        pcow_close(image);
        must_be_clean(scratch("t"));
        assert_true(fault < 1000);
    }
}

/*
 * Two slabs of a snapshot hold pages of one guest slab, and a delete gives them to the active layer
 * one by one. Here after the first: what the guest stores then must be newer than both, for who
 * opens the image later too.
 */
static void test_writes_in_the_middle_of_a_delete(void **state)
{
    pcow_image *image = must_create(scratch("t"), 8 * MIB, 4 * KIB, NULL);
    uint64_t slabs[3] = {0};
    unsigned count = 0;

    (void)state;
    /*
     * So that the active layer's slab is in front of theirs in the file: then theirs are found
     * first when it is opened.
     */
    MUST(pcow_snapshot_create(image, "first", &error));
    MUST(pcow_snapshot_write_state(image, "first", 0, "state", 6, &error));
    MUST(pcow_snapshot_set_state_size(image, "first", 6, &error));
    write_text(image, 0, "0");
    MUST(pcow_snapshot_create(image, "a", &error));
    write_text(image, 4096, "1");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(pcow_snapshot_delete(image, "first", NULL, &error));
    MUST(pcow_reclaim(image, NULL, &error));
    write_text(image, 8192, "2");
    MUST(pcow_snapshot_delete(image, "a", NULL, &error));
    for (slab_ref ref = image->chain->head[0]; ref; ref = image->slabs[slab_ref_slab(ref)].next) {
        assert_true(count < 3);
        slabs[count++] = slab_ref_slab(ref);
    }
    assert_int_equal(count, 3);
    assert_true(slabs[0] < slabs[2] && slabs[2] < slabs[1]);
    image->merging = image->slabs[slabs[1]].layer;
    assert_int_equal(
        slab_publish(image, slabs[2], (struct owner){OWNER_DATA, image_active(image), 0}, true), 0);
    for (uint64_t page = 0; page < 3; page++)
        write_text(image, page * 4096 + 2, "new");
    pcow_close(image);
    must_be_clean(scratch("t"));
    image = must_open(scratch("t"), 0);
    for (uint64_t page = 0; page < 3; page++)
        assert_reads(image, page * 4096, (const char[]){(char)('0' + page), 0, 'n', 'e', 'w', 0},
                     6);
    pcow_close(image);
}

/* The pool has no room for what would be written in one piece behind the page that is stored to. */
static int no_room_for_seven(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    return (observation->what == OBSERVED_WRITE || observation->what == OBSERVED_ALLOCATE)
                   && observation->length == 7 * PCOW_PAGE_SIZE
               ? -ENOSPC
               : 0;
}

/*
 * A part of a cluster has become own and is still mapped to where the snapshot has it. The snapshot
 * is deleted and its blocks are given back; who reads the memory must not see that.
 */
static void test_delete_beneath_half_a_copy(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE,
                                .look = no_room_for_seven};
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL, .full_policy = PCOW_FULL_FAIL};
    unsigned char *data = malloc(2 * MIB);
    const volatile unsigned char *memory;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    assert_non_null(data);
    memset(data, 0x5a, 2 * MIB);
    pcow_close(must_create(scratch("t"), 8 * MIB, 64 * KIB, NULL));
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &observer, &image, &error));
    MUST(pcow_write(image, 0, data, 2 * MIB, &error));
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST(pcow_map_create(image, &options, &map, &error));
    MUST(pcow_map_resolve(map, 8 * 4096, 4096, true, &error));
    MUST(pcow_map_resolve(map, 9 * 4096, 4096, true, &error));
    memory = pcow_map_address(map);
    /* Own, and not mapped for stores: what this test is about. */
    assert_true(chain_find(image, 0, 0, 1).own && !page_set_has(&map->slabs[0].writable, 0));
    for (unsigned page = 0; page < 16; page++)
        assert_int_equal(memory[page * 4096], 0x5a);
    MUST(pcow_snapshot_delete(image, "s", NULL, &error));
    MUST(pcow_reclaim(image, NULL, &error));
    for (unsigned page = 0; page < 512; page++)
        if (memory[page * 4096] != 0x5a)
            fail_msg("page %u is %#x", page, memory[page * 4096]);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("t"));
    free(data);
}

/*
 * Memory is short when an image that is mapped is reverted: nothing has changed then, and the guest
 * goes on. The file is long, so that its index is larger than what malloc() may have at hand.
 */
static void test_revert_without_memory(void **state)
{
    struct rlimit limit, before;
    volatile char *memory;
    unsigned long pages;
    pcow_image *image;
    pcow_map *map;
    FILE *statm;
    int ret;

    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();                            /* they need address space without a limit */
#endif
    pcow_close(must_create(scratch("t"), 8 * MIB, 0, NULL));
    assert_int_equal(truncate(scratch("t"), (off_t)(4 * 1024 * 1024 * MIB)), 0);
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    write_text(image, 0, "old");
    MUST(pcow_snapshot_create(image, "s", &error));
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    memory = pcow_map_address(map);
    memory[0] = 'n';
    statm = fopen("/proc/self/statm", "r");
    assert_true(statm && fscanf(statm, "%lu", &pages) == 1);
    fclose(statm);
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    limit = (struct rlimit){.rlim_cur = pages * 4096 + MIB, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_AS, &limit), 0);
    ret = pcow_snapshot_revert(image, "s", NULL);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_int_equal(ret, -ENOMEM);
    assert_int_equal(memory[0], 'n');
    memory[4096] = 1;
    MUST(pcow_snapshot_revert(image, "s", &error));
    assert_int_equal(memory[0], 'o');
    assert_int_equal(memory[4096], 0);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* ---- commit ---------------------------------------------------------------------------------- */

/* "base" and "t" on it, each with a text in every slab. */
static pcow_image *overlay(struct observer *observer)
{
    struct pcow_create_options options = {.base = scratch("base")};
    pcow_image *image;

    unlink(scratch("t"));
    unlink(scratch("base"));
    image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    for (uint64_t offset = 0; offset < 8 * MIB; offset += 2 * MIB)
        write_text(image, offset, "base");
    pcow_close(image);
    MUST(pcow_create(scratch("t"), &options, &error));
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, observer, &image, &error));
    for (uint64_t offset = 0; offset < 8 * MIB; offset += 2 * MIB)
        write_text(image, offset + 4096, "top");
    return image;
}

static int cancel_half_way(void *opaque, uint64_t done, uint64_t total)
{
    (void)opaque;
    return done >= total / 2;
}

/*
 * A commit that came to an end too early: the image goes on as before, and it still notices when
 * its base is changed.
 */
static void test_cancelled_commit(void **state)
{
    pcow_image *image = overlay(NULL);

    (void)state;
    MUST_FAIL(-ECANCELED, pcow_commit(image, cancel_half_way, NULL, &error));
    for (unsigned i = 0; i < 2; i++) {
        for (uint64_t offset = 0; offset < 8 * MIB; offset += 2 * MIB) {
            assert_reads(image, offset, "base", 5);
            assert_reads(image, offset + 4096, "top", 4);
        }
        pcow_close(image);
        image = must_open(scratch("t"), 0);
    }
    pcow_close(image);
    image = must_open(scratch("base"), PCOW_OPEN_WRITE);
    write_text(image, 0, "somebody else");
    pcow_close(image);
    MUST_FAIL(-ESTALE, pcow_open(scratch("t"), 0, NULL, &image, &error));
}

/* When the base is closed, to be opened for writing, another file gets its name. */
static bool replaced;

static int replace_base(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    if (observation->what == OBSERVED_CLOSE && !replaced)
        replaced = rename(scratch("other"), scratch("base")) == 0;
    return 0;
}

static void test_commit_into_another_file(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = replace_base};
    pcow_image *image;

    (void)state;
    replaced = true;
    image = overlay(&observer);
    pcow_close(must_create(scratch("other"), 8 * MIB, 0, NULL));
    replaced = false;
    MUST_FAIL(-ESTALE, pcow_commit(image, NULL, NULL, &error));
    assert_true(replaced);
    pcow_close(image);
    image = must_open(scratch("base"), 0);
    assert_reads(image, 4096, (const char[4]){0}, 4);
    pcow_close(image);
    MUST_FAIL(-ESTALE, pcow_open(scratch("t"), 0, NULL, &image, &error));
}

/*
 * What is written after a commit that failed, wherever it can, to slabs that it was about to give
 * back.
 */
static void test_writes_after_a_failed_commit(void **state)
{
    bool reached_end = false;

    (void)state;
    for (int fault = 0; !reached_end; fault++) {
        struct faulty faulty = {
            .observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look}, .left = -1};
        pcow_image *image = overlay(&faulty.observer);
        char page[4096] = "after";

        faulty.left = fault;
        (void)pcow_commit(image, NULL, NULL, NULL);
        reached_end = faulty.left >= 0;
        faulty.left = -1;
        for (uint64_t offset = 0; offset < 8 * MIB; offset += 2 * MIB)
            MUST(pcow_write(image, offset + 8192, page, sizeof page, &error));
        /* It may have to tell of what the commit met. */
        if (pcow_flush(image, NULL))
            MUST(pcow_flush(image, &error));
        pcow_close(image);
        must_be_clean(scratch("t"));
        image = must_open(scratch("t"), 0);
        for (uint64_t offset = 0; offset < 8 * MIB; offset += 2 * MIB) {
            assert_reads(image, offset, "base", 5);
            assert_reads(image, offset + 4096, "top", 4);
            assert_reads(image, offset + 8192, page, sizeof page);
        }
        pcow_close(image);
        assert_true(fault < 1000);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_failed_rename_then_delete),
        TEST(test_failed_delete),
        TEST(test_failed_create_then_another),
        TEST(test_failed_create_then_a_child),
        TEST(test_writes_in_the_middle_of_a_delete),
        TEST(test_delete_beneath_half_a_copy),
        TEST(test_flush_tells_what_another_commit_met),
        TEST(test_revert_without_memory),
        TEST(test_cancelled_commit),
        TEST(test_commit_into_another_file),
        TEST(test_writes_after_a_failed_commit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
