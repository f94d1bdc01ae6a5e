/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Images that are open for reading only, in more pieces than there are mappings for. The program is
 * linked so that its calls of mmap(), mremap() and pread() pass by here, and can fail.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "operations/operations.h"
#include "persist/copy.h"
#include "persist/observer.h"

#define SIZE (64 * MIB)
/* by the base; nothing holds more of the rest than top.pcow does */
#define HELD (48 * MIB)
#define WHOLE (8 * MIB)                /* one slab from here on lies in one piece */
#define STEP (128 * KIB)               /* from one cluster of top.pcow to the next */
#define BUDGET 100u
#define FAR (40 * MIB)                 /* not mapped at first */

static struct {
    _Atomic bool no_memory, no_move;
    _Atomic off64_t unreadable;        /* page of the file; 0: none */
    _Atomic unsigned refused;
} step;

void *__real_mmap64(void *address, size_t length, int protection, int flags, int fd,
                    off64_t offset);
void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd,
                    off64_t offset);
void *__real_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);
void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);
ssize_t __real_pread64(int fd, void *to, size_t length, off64_t offset);
ssize_t __wrap_pread64(int fd, void *to, size_t length, off64_t offset);

void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    if (step.no_memory && !address && length == PCOW_SLAB_SIZE && fd < 0) {
        step.refused++;
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return __real_mmap64(address, length, protection, flags, fd, offset);
}

void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new)
{
    if (!step.no_move)
        return __real_mremap(old, old_size, new_size, flags, new);
    step.refused++;
    munmap(new, new_size);
    errno = ENOMEM;
    return MAP_FAILED;
}

ssize_t __wrap_pread64(int fd, void *to, size_t length, off64_t offset)
{
    if (step.unreadable && offset <= step.unreadable
        && offset + (off64_t)length > step.unreadable) {
        step.refused++;
        errno = EIO;
        return -1;
    }
    return __real_pread64(fd, to, length, offset);
}

static unsigned char expected(uint64_t offset)
{
    if (offset - WHOLE < PCOW_SLAB_SIZE || offset % STEP < STEP / 2)
        return (unsigned char)(1 + offset / STEP % 200);
    return offset < HELD ? 0xfa : 0;
}

static void make_images(void)
{
    pcow_image *image = must_create(scratch("base.pcow"), SIZE, 0, NULL);
    unsigned char *bytes = malloc(HELD);

    assert_non_null(bytes);
    memset(bytes, 0xfa, HELD);
    MUST(pcow_write(image, 0, bytes, HELD, &error));
    pcow_close(image);
    image = must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
    for (uint64_t offset = 0; offset < SIZE; offset += STEP) {
        memset(bytes, expected(offset), STEP);
        MUST(pcow_write(image, offset, bytes, offset - WHOLE < PCOW_SLAB_SIZE ? STEP : STEP / 2,
                        &error));
    }
    pcow_close(image);
    free(bytes);
}

static int setup(void **state)
{
    step.no_memory = step.no_move = false;
    step.unreadable = 0;
    step.refused = 0;
    if (scratch_setup(state))
        return -1;
    make_images();
    return 0;
}

static unsigned count_wrong(const pcow_map *map, uint64_t from, uint64_t to)
{
    const volatile unsigned char *memory = pcow_map_address(map);
    unsigned wrong = 0;

    for (uint64_t offset = from; offset < to; offset += 4096)
        wrong += memory[offset] != expected(offset) || memory[offset + 4095] != expected(offset);
    return wrong;
}

static void must_keep_to_budget(const pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    assert_true(stats.vmas <= BUDGET);
    assert_true(count_mappings(pcow_map_address(map), SIZE) <= stats.vmas);
}

static void test_scattered(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_open(scratch("top.pcow"), 0);
        pcow_map *map = must_map_by(image, engine, BUDGET);
        unsigned char *memory = pcow_map_address(map);
        struct pcow_map_stats before, after;

        must_keep_to_budget(map);
        assert_int_equal(memory[WHOLE], expected(WHOLE));
        pcow_map_get_stats(map, &before);
        assert_int_equal(before.read_traps, 0);
        assert_int_equal(count_wrong(map, 0, SIZE), 0);
        must_keep_to_budget(map);
        pcow_map_get_stats(map, &after);
        /*
         * Two or three slabs have as many mappings as they need. Each of the others was loaded
         * once, and is in memory.
         */
        assert_in_range(after.read_traps, SIZE / PCOW_SLAB_SIZE - 4, SIZE / PCOW_SLAB_SIZE - 2);
        assert_int_equal(after.memory - before.memory, after.read_traps * PCOW_SLAB_SIZE);
        assert_int_equal(count_wrong(map, 0, SIZE), 0);
        assert_int_equal(pcow_map_resolve(map, FAR, 4096, true, NULL), -EROFS);
        assert_int_equal(kernel_store(memory + FAR, 1), -1);
        pcow_map_destroy(map);
        pcow_close(image);
    }
}

/* With as many as it takes nothing is copied. */
static void test_enough_mappings(void **state)
{
    pcow_image *image = must_open(scratch("top.pcow"), 0);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    struct pcow_map_stats before, after;

    (void)state;
    pcow_map_get_stats(map, &before);
    assert_int_equal(count_wrong(map, 0, SIZE), 0);
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.read_traps, 0);
    assert_int_equal(after.memory, before.memory);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* Who has a system call load from it asks before. */
static void test_system_calls(void **state)
{
    pcow_image *image = must_open(scratch("top.pcow"), 0);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, BUDGET);
    unsigned char *memory = pcow_map_address(map), *bytes = malloc(4 * MIB);
    int fd = open(scratch("file"), O_CREAT | O_RDWR | O_CLOEXEC, 0600);

    (void)state;
    assert_non_null(bytes);
    assert_false(pcow_map_is_accessible(map, FAR, false));
    MUST(pcow_map_resolve(map, FAR + MIB, 4 * MIB, false, &error));
    assert_true(pcow_map_is_accessible(map, FAR, false));
    assert_int_equal(write(fd, memory + FAR + MIB, 4 * MIB), 4 * MIB);
    assert_int_equal(pread(fd, bytes, 4 * MIB, 0), 4 * MIB);
    for (uint64_t at = 0; at < 4 * MIB; at++)
        if (bytes[at] != expected(FAR + MIB + at))
            fail_msg("byte %llu", (unsigned long long)at);
    close(fd);
    free(bytes);
    pcow_map_destroy(map);
    pcow_close(image);
}

static void *load(void *opaque)
{
    return (void *)(uintptr_t)count_wrong(opaque, 0, SIZE);
}

static void test_threads(void **state)
{
    (void)state;
    for (unsigned round = 0; round < 4; round++) {
        pcow_image *image = must_open(scratch("top.pcow"), 0);
        pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, BUDGET);
        pthread_t thread[4];

        for (unsigned i = 0; i < 4; i++)
            assert_int_equal(pthread_create(&thread[i], NULL, load, map), 0);
        for (unsigned i = 0; i < 4; i++) {
            void *wrong;

            pthread_join(thread[i], &wrong);
            assert_null(wrong);
        }
        must_keep_to_budget(map);
        pcow_map_destroy(map);
        pcow_close(image);
    }
}

/*
 * Without memory for a copy, or where the kernel does not move it, more mappings than the budget
 * are better than an error.
 */
static void test_kernel_refuses(void **state)
{
    (void)state;
    for (unsigned move = 0; move < 2; move++) {
        pcow_image *image = must_open(scratch("top.pcow"), 0);
        pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, BUDGET);

        step.refused = 0;
        step.no_memory = !move;
        step.no_move = move;
        assert_int_equal(count_wrong(map, FAR, FAR + PCOW_SLAB_SIZE), 0);
        step.no_memory = step.no_move = false;
        assert_int_equal(step.refused, 1);
        assert_int_equal(count_wrong(map, 0, SIZE), 0);
        pcow_map_destroy(map);
        pcow_close(image);
    }
}

/* A page that cannot be read is an error for who loads from it, not for its neighbours. */
static void test_unreadable_page(void **state)
{
    pcow_image *image = must_open(scratch("top.pcow"), 0);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, BUDGET);
    struct pcow_extent extent;

    (void)state;
    MUST(pcow_get_extent(image, FAR, 4096, &extent, &error));
    step.unreadable = (off64_t)extent.file_offset;
    /* memory can be loaded from */
    assert_int_equal(count_wrong(map, FAR, FAR + PCOW_SLAB_SIZE), 0);
    assert_true(step.refused > 0);
    step.unreadable = 0;
    pcow_map_destroy(map);
    pcow_close(image);
}

static int look(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    (void)observation;
    return 0;
}

/*
 * The kernel has told of a page before the slab is loaded from, and of one in a slab that is in
 * memory already.
 */
static void test_lost_pages(void **state)
{
    static struct observer observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look};
    struct pcow_map_options options = {.vma_budget = BUDGET};
    const unsigned char *memory;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    signal(SIGBUS, SIG_DFL);           /* in place of cmocka's: then the library has one */
    MUST(image_open(scratch("top.pcow"), 0, NULL, &observer, &image, &error));
    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
    MUST(pcow_map_lose(map, FAR + 4096, &error));
    assert_int_equal(count_wrong(map, FAR + 4 * MIB, FAR + 6 * MIB), 0);
    MUST(pcow_map_lose(map, FAR + 4 * MIB + 4096, &error));
    for (uint64_t from = FAR; from <= FAR + 4 * MIB; from += 4 * MIB) {
        assert_false(copy_touch(memory + from + 4096));
        assert_int_equal(pcow_map_resolve(map, from, 4096, false, NULL), 0);
        assert_int_equal(count_wrong(map, from, from + 4096), 0);
        assert_int_equal(count_wrong(map, from + 8192, from + PCOW_SLAB_SIZE), 0);
    }
    assert_int_equal(count_wrong(map, FAR + 6 * MIB, SIZE), 0);
    pcow_map_destroy(map);
    pcow_close(image);
}

/*
 * The caller had memory of his own over a page; of slabs that were loaded before, and of one that
 * was not.
 */
static void test_restore(void **state)
{
    pcow_image *image = must_open(scratch("top.pcow"), 0);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, BUDGET);
    unsigned char *memory = pcow_map_address(map);
    struct pcow_map_stats before, after;

    (void)state;
    for (unsigned loaded = 0; loaded < 2; loaded++) {
        pcow_map_get_stats(map, &before);
        assert_ptr_equal(mmap(memory + FAR + 4096, 4096, PROT_READ,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
                         memory + FAR + 4096);
        MUST(pcow_map_restore(map, FAR + 4096, 4096, &error));
        pcow_map_get_stats(map, &after);
        assert_int_equal(after.memory - before.memory, loaded ? 0 : PCOW_SLAB_SIZE);
        assert_int_equal(count_wrong(map, FAR, FAR + PCOW_SLAB_SIZE), 0);
    }
    /* There is room for its pieces by now. */
    map->vma_budget = 1000;
    MUST(pcow_map_restore(map, FAR + 4096, 4096, &error));
    pcow_map_get_stats(map, &after);
    assert_int_equal(before.memory - after.memory, PCOW_SLAB_SIZE);
    map->vma_budget = BUDGET;
    assert_int_equal(count_wrong(map, 0, SIZE), 0);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_scattered, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_enough_mappings, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_system_calls, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_threads, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_kernel_refuses, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_unreadable_page, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_lost_pages, setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_restore, setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
