/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Readers of a snapshot, and an image that stands on it, beside a writer that does everything to
 * the tree: they never see a change.
 */
#include "support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE (8 * MIB)

static void write_some(pcow_image *image, uint64_t *seed)
{
    unsigned char bytes[5 * 4096];
    size_t length = 4096 * (1 + random_next(seed) % 5);

    fill_pattern(bytes, length, seed);
    MUST(pcow_write(image, random_next(seed) % ((SIZE - sizeof bytes) / 4096) * 4096, bytes, length,
                    &error));
}

/*
 * In a process of its own, where a test cannot fail. On a busy machine a reader may hold the tree
 * for long: then not this time.
 */
static void must(int ret, const struct pcow_error *error)
{
    if (ret && ret != -EBUSY) {
        fprintf(stderr, "writer: %s\n", error->message);
        _exit(3);
    }
}

/* Any operation but deletion of 's', which must not succeed. */
static void change_tree(pcow_image *image, unsigned *counter, uint64_t *seed)
{
    struct pcow_error error = {0};
    struct pcow_snapshot *list;
    const char *name;
    char fresh[32];
    size_t count;

    must(pcow_snapshot_list(image, &list, &count, &error), &error);
    name = list[random_next(seed) % count].name;
    snprintf(fresh, sizeof fresh, "w%u", (*counter)++);
    switch (random_next(seed) % (count > 10 ? 6 : 4)) {
    case 0: case 1: must(pcow_snapshot_create(image, fresh, &error), &error); break;
    case 2: must(pcow_snapshot_revert(image, name, &error), &error); break;
    case 3:
        if (strcmp(name, "s"))
            must(pcow_snapshot_rename(image, name, fresh, &error), &error);
        break;
    default:
        if (strcmp(name, "s"))
            must(pcow_snapshot_delete(image, name, NULL, &error), &error);
        else if (pcow_snapshot_delete(image, name, NULL, NULL) != -EBUSY)
            _exit(4);
        break;
    }
    free(list);
}

static void be_the_writer(const char *path, int begin, int ready, uint64_t seed)
{
    struct pcow_error error = {0};
    pcow_image *image;
    unsigned counter = 0;
    char byte;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (read(begin, &byte, 1) != 1)
        _exit(5);
    must(pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, &error), &error);
    if (write(ready, "", 1) != 1)
        _exit(5);
    for (;;) {
        for (unsigned i = random_next(&seed) % 4; i > 0; i--) {
            unsigned char bytes[5 * 4096];
            size_t length = 4096 * (1 + random_next(&seed) % 5);

            fill_pattern(bytes, length, &seed);
            must(pcow_write(image, random_next(&seed) % ((SIZE - sizeof bytes) / 4096) * 4096,
                            bytes, length, &error),
                 &error);
        }
        change_tree(image, &counter, &seed);
    }
}

static void test_readers_beside_a_writer(void **state)
{
    unsigned char *expected = malloc(SIZE), *seen = malloc(SIZE), ready;
    pcow_image *image = must_create(scratch("base"), SIZE, 4096, NULL), *view, *top;
    uint64_t seed = random_seed();
    unsigned rounds = test_steps(300);
    int begin[2], pipes[2], status;
    pcow_map *map;
    char name[8];
    pid_t writer;

    (void)state;
    assert_true(expected && seen && pipe(begin) == 0 && pipe(pipes) == 0);
    for (unsigned i = 0; i < 8; i++) {
        for (unsigned j = 0; j < 40; j++)
            write_some(image, &seed);
        snprintf(name, sizeof name, i == 5 ? "s" : "a%u", i);
        MUST(pcow_snapshot_create(image, name, &error));
    }
    pcow_close(image);
    MUST(pcow_open(scratch("base"), 0, "s", &view, &error));
    MUST(pcow_read(view, 0, expected, SIZE, &error));
    pcow_close(view);
    /*
     * While there is one thread: AddressSanitizer leaves its locks to a child as another thread had
     * them.
     */
    writer = fork();
    if (writer == 0)
        be_the_writer(scratch("base"), begin[0], pipes[1], seed);
    MUST(pcow_create(scratch("top"),
                     &(struct pcow_create_options){.base = scratch("base"), .base_snapshot = "s"},
                     &error));
    top = must_open(scratch("top"), PCOW_OPEN_WRITE);
    MUST(pcow_map_create(top, NULL, &map, &error));
    assert_int_equal(write(begin[1], "", 1), 1);
    assert_int_equal(read(pipes[0], &ready, 1), 1);
    for (unsigned i = 0; i < rounds; i++) {
        /* Newly loaded tables, tables of the beginning, and memory mapped in the beginning. */
        MUST(pcow_open(scratch("base"), 0, "s", &view, &error));
        MUST(pcow_read(view, 0, seen, SIZE, &error));
        pcow_close(view);
        assert_memory_equal(seen, expected, SIZE);
        if (i % 16)
            continue;
        MUST(pcow_read(top, 0, seen, SIZE, &error));
        assert_memory_equal(seen, expected, SIZE);
        assert_memory_equal(pcow_map_address(map), expected, SIZE);
        assert_int_equal(waitpid(writer, &status, WNOHANG), 0);
    }
    kill(writer, SIGKILL);
    assert_int_equal(waitpid(writer, &status, 0), writer);
    pcow_map_destroy(map);
    pcow_close(top);
    /*
     * Killed at any point; nothing of it matters to the snapshot, before and after the next writer
     * has tidied up.
     */
    for (unsigned i = 0; i < 2; i++) {
        MUST(pcow_open(scratch("base"), 0, "s", &view, &error));
        assert_reads(view, 0, expected, SIZE);
        pcow_close(view);
        pcow_close(must_open(scratch("base"), PCOW_OPEN_WRITE));
    }
    must_be_clean(scratch("base"));
    close(begin[0]);
    close(begin[1]);
    close(pipes[0]);
    close(pipes[1]);
    free(expected);
    free(seen);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_readers_beside_a_writer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
