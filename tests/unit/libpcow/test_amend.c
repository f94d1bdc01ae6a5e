/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * An image of an older version gets a mirror of its metadata, in place: with what lay where the
 * mirror is, and wherever it is killed.
 */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "operations/operations.h"

#define SIZE (16 * MIB)
#define PAGE 4096u
#define IMAGE scratch("old.pcow")
#define STATE_SIZE (3 * MIB)

static uint8_t first[SIZE], now[SIZE], vm_state[STATE_SIZE];

static void write_some(pcow_image *image, uint8_t *model, uint64_t offset, size_t length,
                       uint64_t *seed)
{
    fill_pattern(model + offset, length, seed);
    MUST(pcow_write(image, offset, model + offset, length, &error));
}

/* The first two slabs of data of the file: one with data, one with VM state or data, by turns. */
static void make_image(bool state_first)
{
    uint64_t seed = 5;
    pcow_image *image = must_create_without_mirror(IMAGE, SIZE);

    memset(first, 0, sizeof first);
    if (!state_first)
        write_some(image, first, 3 * PAGE, 30 * PAGE, &seed);
    MUST(pcow_snapshot_create(image, "s", &error));
    fill_pattern(vm_state, sizeof vm_state, &seed);
    MUST(pcow_snapshot_write_state(image, "s", 0, vm_state, sizeof vm_state, &error));
    MUST(pcow_snapshot_set_state_size(image, "s", sizeof vm_state, &error));
    memcpy(now, first, sizeof now);
    write_some(image, now, 2 * MIB + 7 * PAGE, 5 * PAGE, &seed);
    write_some(image, now, 9 * MIB, MIB, &seed);
    pcow_close(image);
}

static void expect_content(void)
{
    uint8_t *content = malloc(SIZE);
    pcow_image *image;

    assert_non_null(content);
    MUST(pcow_open(IMAGE, 0, NULL, &image, &error));
    MUST(pcow_read(image, 0, content, SIZE, &error));
    assert_memory_equal(content, now, SIZE);
    MUST(pcow_snapshot_read_state(image, "s", 0, content, STATE_SIZE, &error));
    assert_memory_equal(content, vm_state, STATE_SIZE);
    pcow_close(image);
    MUST(pcow_open(IMAGE, 0, "s", &image, &error));
    MUST(pcow_read(image, 0, content, SIZE, &error));
    assert_memory_equal(content, first, SIZE);
    pcow_close(image);
    free(content);
}

static void expect_mirror(bool expected)
{
    pcow_image *image = must_open(IMAGE, 0);
    struct pcow_info info;

    pcow_get_info(image, &info);
    assert_int_equal(info.read_only_compatible_features & FEATURE_MIRROR, expected);
    pcow_close(image);
}

static void test_amend(void **state)
{
    (void)state;
    for (unsigned state_first = 0; state_first < 2; state_first++) {
        make_image(state_first);
        expect_mirror(false);
        MUST(pcow_add_mirror(IMAGE, &error));
        expect_mirror(true);
        expect_content();
        must_be_clean(IMAGE);
        /* Nothing happens to one that has it; and it goes on as any other. */
        MUST(pcow_add_mirror(IMAGE, &error));
        pcow_image *image = must_open(IMAGE, PCOW_OPEN_WRITE);
        uint64_t seed = 77;

        write_some(image, now, 12 * MIB, 20 * PAGE, &seed);
        pcow_close(image);
        expect_content();
        must_be_clean(IMAGE);
        unlink(IMAGE);
    }
}

/* Who reads a snapshot keeps what it reads: amend waits for nobody, and says who is in the way. */
static void test_reader_of_a_snapshot(void **state)
{
    uint8_t *content = malloc(SIZE);
    pcow_image *reader;

    (void)state;
    make_image(false);
    MUST(pcow_open(IMAGE, 0, "s", &reader, &error));
    MUST_FAIL(-EBUSY, pcow_add_mirror(IMAGE, &error));
    MUST(pcow_read(reader, 0, content, SIZE, &error));
    assert_memory_equal(content, first, SIZE);
    pcow_close(reader);
    free(content);
    pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
    MUST(pcow_add_mirror(IMAGE, &error));
    expect_content();
    unlink(IMAGE);
}

/* The content is what it was, so what stands on the image opens as before. */
static void test_images_on_it(void **state)
{
    struct pcow_create_options options = {.base = IMAGE};

    (void)state;
    make_image(false);
    MUST(pcow_create(scratch("top.pcow"), &options, &error));
    MUST(pcow_add_mirror(IMAGE, &error));
    pcow_close(must_open(scratch("top.pcow"), PCOW_OPEN_WRITE));
    unlink(scratch("top.pcow"));
    unlink(IMAGE);
}

static int no_space(struct observer *observer, const struct observation *observation)
{
    unsigned *left = (unsigned *)(observer + 1);

    if (observation->what != OBSERVED_ALLOCATE && observation->what != OBSERVED_WRITE)
        return 0;
    return *left ? (--*left, 0) : -ENOSPC;
}

/* The pool is full at any of its requests for space: the image is as it was, and can be used. */
static void test_full_pool(void **state)
{
    unsigned wanted = 0;

    (void)state;
    for (int ret = -ENOSPC; ret; wanted++) {
        struct { struct observer observer; unsigned left; } full = {
            {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = no_space}, wanted};

        unlink(IMAGE);
        make_image(wanted % 2);
        ret = image_add_mirror(IMAGE, &full.observer, NULL);
        if (ret) {
            assert_int_equal(ret, -ENOSPC);
            pcow_close(must_open(IMAGE, PCOW_OPEN_WRITE));
            expect_mirror(false);
        }
        expect_content();
        must_be_clean(IMAGE);
        assert_true(wanted < 1000);
    }
    assert_true(wanted > 5);
    unlink(IMAGE);
}

/* It ends its process before the operation of this number. */
struct killer {
    struct observer observer;
    unsigned count, last;
};

static int count_or_end(struct observer *observer, const struct observation *observation)
{
    struct killer *killer = (struct killer *)observer;

    (void)observation;
    if (++killer->count == killer->last)
        _exit(9);
    return 0;
}

/* Was it killed? */
static bool amend_and_kill(unsigned last)
{
    struct killer killer = {
        .observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = count_or_end}, .last = last};
    pid_t child = fork();
    int status;

    if (child == 0)
        _exit(image_add_mirror(IMAGE, &killer.observer, NULL) ? 1 : 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && (WEXITSTATUS(status) == 9 || WEXITSTATUS(status) == 0));
    return WEXITSTATUS(status) == 9;
}

static int check(unsigned flags, struct pcow_check_result *result)
{
    return pcow_check(IMAGE, flags, NULL, NULL, result, NULL);
}

static void kill_anywhere(bool state_first)
{
    unsigned last = 1, refused = 0, damaged = 0;
    struct pcow_check_result result;
    pcow_image *image;

    for (;; last++) {
        int ret;

        make_image(state_first);
        if (!amend_and_kill(last))
            break;
        ret = pcow_open(IMAGE, PCOW_OPEN_WRITE, NULL, &image, NULL);
        if (ret == 0) {
            pcow_close(image);
        } else if (ret == -EROFS) {
            refused++;
        } else {
            /* Between the two stores of the header: what the error says to do. */
            assert_int_equal(ret, -EBADMSG);
            damaged++;
            assert_int_equal(check(PCOW_CHECK_REPAIR, &result), 0);
            assert_int_equal(result.lost_size, 0);
        }
        expect_content();
        MUST(pcow_add_mirror(IMAGE, &error));
        expect_mirror(true);
        expect_content();
        must_be_clean(IMAGE);
        unlink(IMAGE);
    }
    print_message("killed at %u operations: %u times it asked to be run again, %u times for "
                  "check\n",
                  last - 1, refused, damaged);
    assert_true(last > 30 && refused > 10 && damaged == 1);
    unlink(IMAGE);
}

static void test_killed_anywhere(void **state)
{
    (void)state;
    kill_anywhere(false);
    kill_anywhere(true);
}

/* A check in the midst of it loses nothing, and does not stand in its way. */
static void test_checked_in_between(void **state)
{
    struct pcow_check_result result;

    (void)state;
    for (unsigned last = 3;; last += 7) {
        make_image(last % 2);
        if (!amend_and_kill(last))
            break;
        assert_int_equal(check(PCOW_CHECK_REPAIR, &result), 0);
        assert_int_equal(result.lost_size, 0);
        assert_int_equal(result.corruptions, result.corruptions_fixed);
        expect_content();
        MUST(pcow_add_mirror(IMAGE, &error));
        expect_content();
        must_be_clean(IMAGE);
        unlink(IMAGE);
    }
    unlink(IMAGE);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_amend),
        TEST(test_reader_of_a_snapshot),
        TEST(test_images_on_it),
        TEST(test_full_pool),
        TEST(test_killed_anywhere),
        TEST(test_checked_in_between),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
