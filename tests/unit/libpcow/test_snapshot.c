/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Snapshots beyond what the random model covers: the shape of the tree, VM state, sizes, limits,
 * overlays on a snapshot.
 */
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "image/image.h"
#include "operations/operations.h"

static void test_tree_keeps_every_branch(void **state)
{
    pcow_image *image = must_create(scratch("t"), 8 * MIB, 0, NULL), *view;
    struct pcow_snapshot *list;
    size_t count;

    (void)state;
    write_text(image, 0, "a");
    MUST(pcow_snapshot_create(image, "a", &error));
    write_text(image, 0, "b");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(pcow_snapshot_revert(image, "a", &error));
    write_text(image, 0, "c");
    MUST(pcow_snapshot_create(image, "c", &error));
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 3);
    assert_int_equal(find_snapshot(list, count, "a")->parent_id, 0);
    assert_int_equal(find_snapshot(list, count, "b")->parent_id,
                     find_snapshot(list, count, "a")->id);
    assert_int_equal(find_snapshot(list, count, "c")->parent_id,
                     find_snapshot(list, count, "a")->id);
    assert_true(find_snapshot(list, count, "c")->current);
    assert_false(find_snapshot(list, count, "b")->current);
    assert_int_equal(find_snapshot(list, count, "b")->data_size, 4096);
    free(list);
    /* A fork of the tree: deleting the fork point keeps what both branches need. */
    MUST(pcow_snapshot_delete(image, "a", NULL, &error));
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 2);
    assert_int_equal(find_snapshot(list, count, "b")->parent_id, 0);
    free(list);
    pcow_close(image);
    must_be_clean(scratch("t"));
    for (const char *name = "b"; *name <= 'c'; name = *name == 'b' ? "c" : "d") {
        MUST(pcow_open(scratch("t"), 0, name, &view, &error));
        assert_reads(view, 0, name, 2);
        pcow_close(view);
    }
    MUST_FAIL(-ENOENT, pcow_open(scratch("t"), 0, "a", &view, &error));
}

/* Without a name: to what is below the image, as long as it has no tree. */
static void test_revert_to_the_base(void **state)
{
    pcow_image *image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    pcow_map *map;

    (void)state;
    write_text(image, 0, "base");
    write_text(image, 5 * MIB, "far");
    pcow_close(image);
    image = must_create(scratch("t"), 8 * MIB, 0, scratch("base"));
    write_text(image, 0, "own");
    write_text(image, 6 * MIB, "own");
    MUST(pcow_snapshot_revert(image, NULL, &error));
    assert_reads(image, 0, "base", 5);
    assert_reads(image, 5 * MIB, "far", 4);
    assert_reads(image, 6 * MIB, "\0\0\0", 3);

    MUST(pcow_map_create(image, NULL, &map, &error));
    memcpy((char *)pcow_map_address(map) + 5 * MIB, "new", 4);
    MUST(pcow_snapshot_revert(image, NULL, &error));
    assert_memory_equal((char *)pcow_map_address(map) + 5 * MIB, "far", 4);
    memcpy((char *)pcow_map_address(map), "kept", 5);
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST_FAIL(-EBUSY, pcow_snapshot_revert(image, NULL, &error));
    assert_memory_equal(pcow_map_address(map), "kept", 5);
    pcow_map_destroy(map);
    MUST(pcow_snapshot_delete(image, "s", NULL, &error));
    assert_reads(image, 0, "kept", 5);
    MUST(pcow_snapshot_revert(image, NULL, &error));
    assert_reads(image, 0, "base", 5);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

static void test_delete_gives_space_back(void **state)
{
    pcow_image *image = must_create(scratch("t"), 32 * MIB, 0, NULL);
    char *bytes = malloc(8 * MIB);
    struct pcow_info before, after;
    uint64_t freed;

    (void)state;
    assert_non_null(bytes);
    memset(bytes, 1, 8 * MIB);
    MUST(pcow_write(image, 0, bytes, 8 * MIB, &error));
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST(pcow_write(image, 4 * MIB, bytes, 8 * MIB, &error));
    pcow_get_info(image, &before);
    MUST(pcow_snapshot_delete(image, "s", &freed, &error));
    assert_int_equal(freed, 4 * MIB);                   /* what both held */
    MUST(pcow_reclaim(image, &freed, &error));
    assert_int_equal(freed, 4 * MIB);
    pcow_get_info(image, &after);
    assert_int_equal(before.allocated_size - after.allocated_size, 4 * MIB);
    assert_int_equal(after.data_size, 12 * MIB);
    free(bytes);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

static void test_names(void **state)
{
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 0, NULL);
    char name[PCOW_SNAPSHOT_NAME_SIZE + 1];

    (void)state;
    memset(name, 'n', sizeof name);
    name[PCOW_SNAPSHOT_NAME_SIZE] = 0;
    MUST_FAIL(-EINVAL, pcow_snapshot_create(image, name, &error));
    MUST_FAIL(-EINVAL, pcow_snapshot_create(image, "", &error));
    MUST_FAIL(-EINVAL, pcow_snapshot_create(image, "two\nlines", &error));
    name[PCOW_SNAPSHOT_NAME_SIZE - 1] = 0;
    MUST(pcow_snapshot_create(image, name, &error));
    MUST_FAIL(-ENOENT, pcow_snapshot_rename(image, "x", "y", &error));
    MUST(pcow_snapshot_rename(image, name, "y", &error));
    MUST(pcow_snapshot_rename(image, "y", "y", &error));
    MUST(pcow_snapshot_create(image, name, &error));
    MUST_FAIL(-EEXIST, pcow_snapshot_rename(image, "y", name, &error));
    pcow_close(image);
}

static void test_vm_state(void **state)
{
    const size_t length = 5 * MIB + 123;
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 0, NULL);
    unsigned char *saved = malloc(length), *loaded = malloc(length);
    struct pcow_snapshot *list;
    uint64_t seed = random_seed(), freed;
    struct pcow_info info;
    size_t count;

    (void)state;
    assert_true(saved && loaded);
    fill_pattern(saved, length, &seed);
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST_FAIL(-EINVAL, pcow_snapshot_read_state(image, "s", 0, loaded, 1, &error));
    MUST_FAIL(-EINVAL, pcow_snapshot_set_state_size(image, "s", length, &error));
    MUST(pcow_snapshot_write_state(image, "s", 3 * MIB, saved + 3 * MIB, length - 3 * MIB, &error));
    MUST(pcow_snapshot_write_state(image, "s", 0, saved, 3 * MIB, &error));
    MUST(pcow_snapshot_set_state_size(image, "s", length, &error));
    pcow_close(image);
    must_be_clean(scratch("t"));
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_read_state(image, "s", 0, loaded, length, &error));
    assert_memory_equal(loaded, saved, length);
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(list[0].state_size, length);
    free(list);
    MUST(pcow_snapshot_delete(image, "s", &freed, &error));
    assert_true(freed >= length);
    MUST(pcow_reclaim(image, NULL, &error));
    pcow_get_info(image, &info);
    assert_true(info.allocated_size < MIB);
    pcow_close(image);
    must_be_clean(scratch("t"));
    free(saved);
    free(loaded);
}

static void test_found_by_the_beginning_of_its_name(void **state)
{
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 0, NULL);
    char name[PCOW_SNAPSHOT_NAME_SIZE];

    (void)state;
    assert_false(pcow_snapshot_find_prefix(image, "", name));
    MUST(pcow_snapshot_create(image, "one", &error));
    MUST(pcow_snapshot_create(image, ".mark-1", &error));
    MUST(pcow_snapshot_create(image, ".mark-2", &error));
    assert_false(pcow_snapshot_find_prefix(image, "mark", name));
    assert_true(pcow_snapshot_find_prefix(image, ".mark-", name));
    assert_string_equal(name, ".mark-1");
    MUST(pcow_snapshot_delete(image, ".mark-1", NULL, &error));
    assert_true(pcow_snapshot_find_prefix(image, ".mark-", name));
    assert_string_equal(name, ".mark-2");
    MUST(pcow_snapshot_rename(image, ".mark-2", "two", &error));
    assert_false(pcow_snapshot_find_prefix(image, ".mark-", name));
    pcow_close(image);
}

static void test_overlay_on_a_snapshot_of_its_base(void **state)
{
    struct pcow_create_options options = {.base = scratch("base"), .base_snapshot = "s"};
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL), *top;
    char *bytes = malloc(6 * MIB);
    size_t length;
    FILE *file;

    (void)state;
    write_text(base, 0, "old");
    MUST(pcow_snapshot_create(base, "s", &error));
    write_text(base, 0, "new");
    pcow_close(base);
    MUST(pcow_create(scratch("top"), &options, &error));
    /* The base may go on living: the snapshot cannot change. */
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    write_text(base, 4096, "newer");
    MUST(pcow_snapshot_create(base, "t", &error));
    pcow_close(base);
    top = must_open(scratch("top"), 0);
    assert_reads(top, 0, "old", 4);
    assert_reads(top, 4096, "", 1);
    pcow_close(top);
    /* The image keeps its snapshot (see test_fork.c), but not while it is elsewhere. */
    file = fopen(scratch("top"), "re");
    length = fread(bytes, 1, 6 * MIB, file);
    fclose(file);
    unlink(scratch("top"));
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
    file = fopen(scratch("top"), "we");
    assert_int_equal(fwrite(bytes, 1, length, file), 6 * MIB);
    fclose(file);
    free(bytes);
    MUST_FAIL(-ESTALE, pcow_open(scratch("top"), 0, NULL, &top, &error));
}

static void test_thousands_of_snapshots(void **state)
{
    const unsigned many = 5000;        /* more than the first layer table holds */
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 4096, NULL);
    struct pcow_snapshot *list;
    char name[32];
    size_t count;

    (void)state;
    for (unsigned i = 0; i < many; i++) {
        snprintf(name, sizeof name, "s%u", i);
        if (i % 16 == 0)
            write_text(image, i * 64 % (4 * MIB), name);
        MUST(pcow_snapshot_create(image, name, &error));
    }
    pcow_close(image);
    must_be_clean(scratch("t"));
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, many);
    free(list);
    for (unsigned i = 0; i < many; i += 16) {
        snprintf(name, sizeof name, "s%u", i);
        assert_reads(image, i * 64 % (4 * MIB), name, strlen(name) + 1);
    }
    for (unsigned i = 0; i < many; i += 7) {
        snprintf(name, sizeof name, "s%u", i);
        MUST(pcow_snapshot_delete(image, name, NULL, &error));
    }
    for (unsigned i = 0; i < many; i += 16) {
        snprintf(name, sizeof name, "s%u", i);
        assert_reads(image, i * 64 % (4 * MIB), name, strlen(name) + 1);
    }
    pcow_close(image);
    must_be_clean(scratch("t"));
}

static void test_commit_of_an_image_that_was_smaller(void **state)
{
    pcow_image *image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    static const char zeros[16];

    (void)state;
    write_text(image, 2 * MIB, "kept");
    write_text(image, 6 * MIB, "given up");
    pcow_close(image);
    image = must_create(scratch("t"), 8 * MIB, 0, scratch("base"));
    MUST(pcow_resize(image, 4 * MIB, true, &error));
    MUST(pcow_resize(image, 8 * MIB, false, &error));
    assert_reads(image, 6 * MIB, zeros, sizeof zeros);
    MUST(pcow_commit(image, NULL, NULL, &error));
    pcow_close(image);
    image = must_open(scratch("base"), 0);
    assert_reads(image, 2 * MIB, "kept", 5);
    assert_reads(image, 6 * MIB, zeros, sizeof zeros);
    pcow_close(image);
}

/*
 * A small image on a template that was made larger: what it holds beyond the template's end is the
 * template's after a commit, and still shows.
 */
static void test_commit_of_an_image_that_has_grown(void **state)
{
    pcow_image *image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    static const char zeros[16];

    (void)state;
    write_text(image, 0, "of the base");
    pcow_close(image);
    image = must_create(scratch("t"), 8 * MIB, 0, scratch("base"));
    MUST(pcow_resize(image, 16 * MIB, false, &error));
    write_text(image, 12 * MIB, "beyond");
    for (int round = 0; round < 2; round++) {
        MUST(pcow_commit(image, NULL, NULL, &error));
        assert_reads(image, 0, "of the base", 12);
        assert_reads(image, 12 * MIB, "beyond", 7);
        assert_reads(image, 14 * MIB, zeros, sizeof zeros);
    }
    pcow_close(image);
    must_be_clean(scratch("t"));
    image = must_open(scratch("base"), 0);
    assert_reads(image, 12 * MIB, "beyond", 7);
    pcow_close(image);
}

/*
 * The index of the chain is kept from one revert to the next, and must show what is in the files,
 * base included.
 */
static void test_revert_to_other_sizes(void **state)
{
    pcow_image *image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    static const char zeros[16];

    (void)state;
    write_text(image, 0, "of the base");
    write_text(image, 4 * MIB, "of the base");
    pcow_close(image);
    image = must_create(scratch("t"), 8 * MIB, 0, scratch("base"));
    MUST(pcow_snapshot_create(image, "small", &error));
    write_text(image, 0, "changed");
    write_text(image, 6 * MIB, "new");
    MUST(pcow_resize(image, 16 * MIB, false, &error));
    write_text(image, 12 * MIB, "beyond");
    MUST(pcow_snapshot_create(image, "large", &error));
    write_text(image, 4 * MIB, "dropped");
    for (int round = 0; round < 3; round++) {
        MUST(pcow_snapshot_revert(image, "small", &error));
        assert_int_equal(pcow_size(image), 8 * MIB);
        assert_reads(image, 0, "of the base", 12);
        assert_reads(image, 4 * MIB, "of the base", 12);
        assert_reads(image, 6 * MIB, zeros, sizeof zeros);
        write_text(image, 2 * MIB, "dropped");
        MUST(pcow_snapshot_revert(image, "small", &error));
        assert_reads(image, 2 * MIB, zeros, sizeof zeros);
        MUST(pcow_snapshot_revert(image, "large", &error));
        assert_int_equal(pcow_size(image), 16 * MIB);
        assert_reads(image, 0, "changed", 8);
        assert_reads(image, 4 * MIB, "of the base", 12);
        assert_reads(image, 6 * MIB, "new", 4);
        assert_reads(image, 12 * MIB, "beyond", 7);
        write_text(image, 12 * MIB, "dropped");
        MUST(pcow_snapshot_revert(image, "large", &error));
        assert_reads(image, 12 * MIB, "beyond", 7);
    }
    pcow_close(image);
    must_be_clean(scratch("t"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

/* Pieces in any order, of two snapshots by turns, of which one goes. */
static void test_state_in_any_order(void **state)
{
    pcow_image *image = must_create(scratch("state"), 8 * MIB, 0, NULL);
    const uint64_t pieces = 7;
    char text[16], found[16];

    (void)state;
    MUST(pcow_snapshot_create(image, "one", &error));
    MUST(pcow_snapshot_create(image, "two", &error));
    for (uint64_t i = 0; i < pieces; i++) {
        uint64_t piece = i * 3 % pieces;

        for (unsigned of = 0; of < 2; of++) {
            snprintf(text, sizeof text, "%s %u", of ? "two" : "one", (unsigned)piece);
            MUST(pcow_snapshot_write_state(image, of ? "two" : "one", piece * 2 * MIB + 5, text,
                                           sizeof text, &error));
        }
        if (i + 1 < pieces)
            MUST_FAIL(-EINVAL,
                      pcow_snapshot_set_state_size(image, "two", pieces * 2 * MIB, &error));
    }
    MUST(pcow_snapshot_set_state_size(image, "one", pieces * 2 * MIB, &error));
    MUST(pcow_snapshot_set_state_size(image, "two", pieces * 2 * MIB, &error));
    MUST(pcow_snapshot_delete(image, "one", NULL, &error));
    for (unsigned opened = 0; opened < 2; opened++) {
        for (uint64_t piece = 0; piece < pieces; piece++) {
            snprintf(text, sizeof text, "two %u", (unsigned)piece);
            MUST(pcow_snapshot_read_state(image, "two", piece * 2 * MIB + 5, found, sizeof found,
                                          &error));
            assert_string_equal(found, text);
        }
        pcow_close(image);
        image = must_open(scratch("state"), PCOW_OPEN_WRITE);
    }
    MUST(pcow_snapshot_create(image, "one", &error));
    MUST_FAIL(-EINVAL, pcow_snapshot_set_state_size(image, "one", 1, &error));
    pcow_close(image);
    must_be_clean(scratch("state"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_tree_keeps_every_branch),
        TEST(test_delete_gives_space_back),
        TEST(test_names),
        TEST(test_vm_state),
        TEST(test_found_by_the_beginning_of_its_name),
        TEST(test_overlay_on_a_snapshot_of_its_base),
        TEST(test_thousands_of_snapshots),
        TEST(test_commit_of_an_image_that_was_smaller),
        TEST(test_commit_of_an_image_that_has_grown),
        TEST(test_revert_to_other_sizes),
        TEST(test_revert_to_the_base),
        TEST(test_state_in_any_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
