/* SPDX-License-Identifier: BSD-3-Clause */
/* Snapshots beyond what the random model covers: the shape of the tree, VM state, sizes, limits, overlays on a snapshot. */
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "image/image.h"
#include "operations/operations.h"
#include "persist/observer.h"

static void put(pcow_image *image, uint64_t offset, const char *text)
{
    MUST(pcow_write(image, offset, text, strlen(text) + 1, &error));
}

static const struct pcow_snapshot *find(const struct pcow_snapshot *list, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i].name, name) == 0)
            return &list[i];
    return NULL;
}

static void test_tree_keeps_every_branch(void **state)
{
    pcow_image *image = must_create(scratch("t"), 8 * MIB, 0, NULL), *view;
    struct pcow_snapshot *list;
    size_t count;

    (void)state;
    put(image, 0, "a");
    MUST(pcow_snapshot_create(image, "a", &error));
    put(image, 0, "b");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(pcow_snapshot_revert(image, "a", &error));
    put(image, 0, "c");
    MUST(pcow_snapshot_create(image, "c", &error));
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 3);
    assert_int_equal(find(list, count, "a")->parent_id, 0);
    assert_int_equal(find(list, count, "b")->parent_id, find(list, count, "a")->id);
    assert_int_equal(find(list, count, "c")->parent_id, find(list, count, "a")->id);
    assert_true(find(list, count, "c")->current);
    assert_false(find(list, count, "b")->current);
    assert_int_equal(find(list, count, "b")->data_size, 4096);
    free(list);
    /* A fork of the tree: deleting the fork point keeps what both branches need. */
    MUST(pcow_snapshot_delete(image, "a", NULL, &error));
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 2);
    assert_int_equal(find(list, count, "b")->parent_id, 0);
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

static void test_overlay_on_a_snapshot_of_its_base(void **state)
{
    struct pcow_create_options options = {.base = scratch("base"), .base_snapshot = "s"};
    pcow_image *base = must_create(scratch("base"), 4 * MIB, 0, NULL), *top;
    char *bytes = malloc(2 * MIB);
    size_t length;
    FILE *file;

    (void)state;
    put(base, 0, "old");
    MUST(pcow_snapshot_create(base, "s", &error));
    put(base, 0, "new");
    pcow_close(base);
    MUST(pcow_create(scratch("top"), &options, &error));
    /* The base may go on living: the snapshot cannot change. */
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    put(base, 4096, "newer");
    MUST(pcow_snapshot_create(base, "t", &error));
    pcow_close(base);
    top = must_open(scratch("top"), 0);
    assert_reads(top, 0, "old", 4);
    assert_reads(top, 4096, "", 1);
    pcow_close(top);
    /* The image keeps its snapshot (see test_fork.c), but not while it is elsewhere. */
    file = fopen(scratch("top"), "re");
    length = fread(bytes, 1, 2 * MIB, file);
    fclose(file);
    unlink(scratch("top"));
    base = must_open(scratch("base"), PCOW_OPEN_WRITE);
    MUST(pcow_snapshot_delete(base, "s", NULL, &error));
    pcow_close(base);
    file = fopen(scratch("top"), "we");
    assert_int_equal(fwrite(bytes, 1, length, file), 2 * MIB);
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
            put(image, i * 64 % (4 * MIB), name);
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

/* Lets the call number "left" fail, and all later ones work. */
struct faulty {
    struct observer observer;
    int left;
};

static int look(struct observer *observer, const struct observation *observation)
{
    struct faulty *faulty = (struct faulty *)observer;

    if (observation->what == OBSERVED_STORE || observation->what == OBSERVED_COPY || observation->what == OBSERVED_FLUSH
        || observation->what == OBSERVED_FENCE || observation->what == OBSERVED_OPEN || observation->what == OBSERVED_CLOSE)
        return 0;
    return faulty->left-- == 0 ? -EIO : 0;
}

/* Three snapshots, "b" with a branch and a VM state; in class page-cache, where every flush may fail. */
static pcow_image *faulty_tree(struct faulty *faulty)
{
    pcow_image *image;

    unlink(scratch("t"));
    *faulty = (struct faulty){.observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look}, .left = -1};
    pcow_close(must_create(scratch("t"), 8 * MIB, 0, NULL));
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &faulty->observer, &image, &error));
    put(image, 0, "a");
    MUST(pcow_snapshot_create(image, "a", &error));
    put(image, 0, "b");
    MUST(pcow_snapshot_create(image, "b", &error));
    MUST(pcow_snapshot_write_state(image, "b", 0, "state", 6, &error));
    MUST(pcow_snapshot_set_state_size(image, "b", 6, &error));
    put(image, 4096, "c");
    MUST(pcow_snapshot_create(image, "c", &error));
    MUST(pcow_snapshot_revert(image, "b", &error));
    put(image, 8192, "d");
    return image;
}

/* A rename that failed wherever it can; the snapshot is deleted by the same process. It must not come back. */
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
        assert_null(find(list, count, "c"));
        assert_null(find(list, count, "renamed"));
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

/* What the kernel could not write is told to one commit only; if that was not the user's own flush, his next one has to say it. */
static void test_flush_tells_what_another_commit_met(void **state)
{
    struct faulty faulty;
    pcow_image *image = faulty_tree(&faulty);

    (void)state;
    MUST(pcow_flush(image, &error));
    put(image, 16384, "lost");
    faulty.left = 0;
    assert_int_equal(file_commit(&image->file), -EIO);
    faulty.left = -1;
    MUST_FAIL(-EIO, pcow_flush(image, &error));
    MUST(pcow_flush(image, &error));
    pcow_close(image);
}

/* What a resize has given up is gone from the base as well when the image is committed to it. */
static void test_commit_of_an_image_that_was_smaller(void **state)
{
    pcow_image *image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    static const char zeros[16];

    (void)state;
    put(image, 2 * MIB, "kept");
    put(image, 6 * MIB, "given up");
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

/* The index of the chain is kept from one revert to the next, and must show what is in the files, base included. */
static void test_revert_to_other_sizes(void **state)
{
    pcow_image *image = must_create(scratch("base"), 8 * MIB, 0, NULL);
    static const char zeros[16];

    (void)state;
    put(image, 0, "of the base");
    put(image, 4 * MIB, "of the base");
    pcow_close(image);
    image = must_create(scratch("t"), 8 * MIB, 0, scratch("base"));
    MUST(pcow_snapshot_create(image, "small", &error));
    put(image, 0, "changed");
    put(image, 6 * MIB, "new");
    MUST(pcow_resize(image, 16 * MIB, false, &error));
    put(image, 12 * MIB, "beyond");
    MUST(pcow_snapshot_create(image, "large", &error));
    put(image, 4 * MIB, "dropped");
    for (int round = 0; round < 3; round++) {
        MUST(pcow_snapshot_revert(image, "small", &error));
        assert_int_equal(pcow_size(image), 8 * MIB);
        assert_reads(image, 0, "of the base", 12);
        assert_reads(image, 4 * MIB, "of the base", 12);
        assert_reads(image, 6 * MIB, zeros, sizeof zeros);
        put(image, 2 * MIB, "dropped");
        MUST(pcow_snapshot_revert(image, "small", &error));
        assert_reads(image, 2 * MIB, zeros, sizeof zeros);
        MUST(pcow_snapshot_revert(image, "large", &error));
        assert_int_equal(pcow_size(image), 16 * MIB);
        assert_reads(image, 0, "changed", 8);
        assert_reads(image, 4 * MIB, "of the base", 12);
        assert_reads(image, 6 * MIB, "new", 4);
        assert_reads(image, 12 * MIB, "beyond", 7);
        put(image, 12 * MIB, "dropped");
        MUST(pcow_snapshot_revert(image, "large", &error));
        assert_reads(image, 12 * MIB, "beyond", 7);
    }
    pcow_close(image);
    must_be_clean(scratch("t"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_tree_keeps_every_branch),
        TEST(test_delete_gives_space_back),
        TEST(test_names),
        TEST(test_vm_state),
        TEST(test_overlay_on_a_snapshot_of_its_base),
        TEST(test_thousands_of_snapshots),
        TEST(test_failed_rename_then_delete),
        TEST(test_failed_delete),
        TEST(test_commit_of_an_image_that_was_smaller),
        TEST(test_flush_tells_what_another_commit_met),
        TEST(test_revert_to_other_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
