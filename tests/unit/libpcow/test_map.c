/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The image monitor, the same tests for every engine: who may store where, what is copied, what
 * many threads do at once.
 */
#include "support.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"

static void remove_images(void)
{
    unlink(scratch("base.pcow"));
    unlink(scratch("top.pcow"));
}

static void test_absent_memory_reads_zero_and_takes_no_space(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    const unsigned char *memory = pcow_map_address(map);
    struct pcow_info info;

    assert_int_equal((uintptr_t)memory % PCOW_SLAB_SIZE, 0);
    for (uint64_t i = 0; i < 64 * MIB; i += 4096)
        assert_int_equal(memory[i], 0);
    pcow_get_info(image, &info);
    assert_int_equal(info.data_size, 0);
    assert_true(info.allocated_size < 64 * KIB);
    pcow_map_destroy(map);
    pcow_close(image);
}

static void test_stores_survive_reopening(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(scratch("top.pcow"), 8 * MIB, 0, NULL);
        pcow_map *map = must_map_by(image, engine, 0);
        struct pcow_map_stats stats;

        memcpy((char *)pcow_map_address(map) + 3 * MIB + 4090, "over a page border", 18);
        pcow_map_get_stats(map, &stats);
        assert_true(stats.engine == engine
                    || (engine == PCOW_ENGINE_MINOR && stats.engine == PCOW_ENGINE_SIGNAL));
        assert_int_equal(stats.pages_zeroed, 16);      /* one cluster */
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        image = must_open(scratch("top.pcow"), 0);
        assert_reads(image, 3 * MIB + 4090, "over a page border", 18);
        pcow_close(image);
        remove_images();
    }
}

static void test_base_is_never_changed(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create_overlay(4 * MIB, 0x5a), *base;
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map);
        struct pcow_map_stats stats;

        assert_int_equal(memory[MIB], 0x5a);
        memory[MIB] = 1;
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.pages_copied, 1);       /* fine-grained: the page, not the cluster */
        assert_int_equal(memory[MIB + 1], 0x5a);
        memory[MIB + 8192] = 2;                        /* hot: the rest of its cluster */
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.pages_copied, 16);
        base = pcow_base(image);
        for (uint64_t offset = 0; offset < 4 * MIB; offset += 4096) {
            unsigned char byte;

            MUST(pcow_read(base, offset, &byte, 1, &error));
            assert_int_equal(byte, 0x5a);
        }
        pcow_map_destroy(map);
        pcow_close(image);
        remove_images();
    }
}

static void test_snapshot_freezes_and_revert_restores(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(scratch("top.pcow"), 16 * MIB, 0, NULL);
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map);

        memset(memory, 1, 5 * MIB);
        MUST(pcow_snapshot_create(image, "one", &error));
        memset(memory + MIB, 2, 5 * MIB);
        MUST(pcow_snapshot_create(image, "two", &error));
        memset(memory + 2 * MIB, 3, 8 * MIB);
        assert_int_equal(memory[0], 1);
        assert_int_equal(memory[MIB], 2);
        assert_int_equal(memory[9 * MIB], 3);
        MUST(pcow_snapshot_revert(image, "one", &error));
        assert_int_equal(memory[MIB], 1);
        assert_int_equal(memory[5 * MIB], 0);
        memory[MIB] = 4;
        MUST(pcow_snapshot_revert(image, "two", &error));
        assert_int_equal(memory[MIB], 2);
        assert_int_equal(memory[0], 1);
        assert_int_equal(memory[9 * MIB], 0);
        /*
         * While mapped: the frozen layer becomes part of the active one, nothing changes for the
         * guest.
         */
        MUST(pcow_snapshot_delete(image, "two", NULL, &error));
        assert_int_equal(memory[MIB], 2);
        memory[MIB] = 5;
        assert_int_equal(memory[MIB + 4096], 2);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        remove_images();
    }
}

/*
 * What freeze falls back to when the kernel refuses to write-protect: nothing is mapped, and
 * everything is still right.
 */
static void test_memory_without_mappings(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create_overlay(8 * MIB, 0x5a), *view;
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map);

        memset(memory + MIB, 1, 4 * MIB);
        MUST(pcow_snapshot_create(image, "s", &error));
        turnstile_hold(map);               /* as a freeze does */
        MUST(monitor_unmap_all(map, &error));
        turnstile_release(map);
        memory[2 * MIB] = 2;
        for (uint64_t offset = 0; offset < 8 * MIB; offset += 4096)
            assert_int_equal(memory[offset], offset == 2 * MIB                   ? 2
                                             : offset >= MIB && offset < 5 * MIB ? 1
                                                                                 : 0x5a);
        MUST(pcow_open(scratch("top.pcow"), PCOW_OPEN_FORCE_SHARE, "s", &view, &error));
        assert_reads(view, 2 * MIB, "\1", 1);
        pcow_close(view);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        remove_images();
    }
}

static void test_kernel_access_after_resolve(void **state)
{
    int fds[2];
    char buffer[8192];

    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create_overlay(4 * MIB, 0x5a);
        pcow_map *map = must_map_by(image, engine, 0);
        char *memory = pcow_map_address(map);

        memset(buffer, 0x77, sizeof buffer);
        assert_int_equal(pipe(fds), 0);
        assert_int_equal(write(fds[1], buffer, sizeof buffer), sizeof buffer);
        /*
         * What virtio-blk does: a system call stores into the guest's memory. Without the call
         * below it gets EFAULT.
         */
        assert_int_equal(read(fds[0], memory + MIB, 100), -1);
        assert_int_equal(errno, EFAULT);
        assert_int_equal(pcow_map_resolve(map, MIB, sizeof buffer, true, NULL), 0);
        assert_int_equal(read(fds[0], memory + MIB, sizeof buffer), sizeof buffer);
        assert_memory_equal(memory + MIB, buffer, sizeof buffer);
        assert_int_equal((unsigned char)memory[MIB + sizeof buffer], 0x5a);
        assert_int_equal(pcow_map_resolve(map, 4 * MIB - 10, 11, true, NULL), -EINVAL);
        close(fds[0]);
        close(fds[1]);
        pcow_map_destroy(map);
        pcow_close(image);
        remove_images();
    }
}

static void test_what_can_be_stored_to(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
    {
        pcow_image *image = must_create(scratch("top.pcow"), 4 * MIB, 0, NULL);
        pcow_map *map = must_map_by(image, engine, 0);

        assert_false(pcow_map_can_store(map, MIB));
        MUST(pcow_map_prepare(map, MIB, 1, true, &error));
        assert_true(pcow_map_can_store(map, MIB + 4095));
        assert_false(pcow_map_can_store(map, 3 * MIB));
        /* The next store has to copy. */
        MUST(pcow_snapshot_create(image, "s", &error));
        assert_false(pcow_map_can_store(map, MIB));
        assert_false(pcow_map_can_store(map, 4 * MIB));
        assert_false(pcow_map_can_store(map, UINT64_MAX));
        pcow_map_destroy(map);
        pcow_close(image);
        remove_images();
    }
}

static void test_no_such_engine(void **state)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_MINOR + 1};
    pcow_image *image = must_create(scratch("image"), 2 * MIB, 0, NULL);
    pcow_map *map;

    (void)state;
    MUST_FAIL(-EINVAL, pcow_map_create(image, &options, &map, &error));
    pcow_close(image);
}

/* ---- many threads ---------------------------------------------------------------------------- */

#define THREADS 4
#define RACE_SIZE (32 * MIB)

struct racer {
    unsigned char *memory;
    unsigned number;
    pthread_barrier_t *barrier;
};

/*
 * All threads store to every page, each to its own byte: a page copied twice would lose somebody's
 * byte.
 */
static void *race(void *opaque)
{
    struct racer *racer = opaque;

    pthread_barrier_wait(racer->barrier);
    for (uint64_t offset = 0; offset < RACE_SIZE; offset += 4096)
        racer->memory[offset + racer->number * 8] = (unsigned char)(racer->number + 1);
    return NULL;
}

static void test_threads_on_the_same_pages(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create_overlay(RACE_SIZE / 2, 0x5a);
        struct racer racers[THREADS];
        pthread_t threads[THREADS];
        pthread_barrier_t barrier;
        unsigned char *memory;
        pcow_map *map;

        MUST(pcow_resize(image, RACE_SIZE, false, &error));
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        pthread_barrier_init(&barrier, NULL, THREADS);
        for (unsigned i = 0; i < THREADS; i++) {
            racers[i] = (struct racer){memory, i, &barrier};
            assert_int_equal(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
        }
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        for (uint64_t offset = 0; offset < RACE_SIZE; offset += 4096)
            for (unsigned i = 0; i < 4096; i++) {
                unsigned char expected = i % 8 == 0 && i / 8 < THREADS ? (unsigned char)(i / 8 + 1)
                                         : offset < RACE_SIZE / 2      ? 0x5a
                                                                       : 0;

                if (memory[offset + i] != expected)
                    fail_msg("byte %llu is %02x, not %02x", (unsigned long long)(offset + i),
                             memory[offset + i], expected);
            }
        pthread_barrier_destroy(&barrier);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        remove_images();
    }
}

/* ---- signals of others ----------------------------------------------------------------------- */

static sigjmp_buf recovered;
static void *volatile seen_address;

static void other_handler(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)context;
    seen_address = info->si_addr;
    siglongjmp(recovered, 1);
}

static void test_foreign_faults_reach_the_previous_handler(void **state)
{
    struct sigaction action = {.sa_sigaction = other_handler, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before, after;
    pcow_image *image;
    pcow_map *map;
    char *nowhere;

    (void)state;
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    image = must_create(scratch("top.pcow"), 4 * MIB, 0, NULL);
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    *(char *)pcow_map_address(map) = 1;
    nowhere = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (sigsetjmp(recovered, 1) == 0)
        *(volatile char *)nowhere = 1;
    assert_ptr_equal(seen_address, nowhere);
    munmap(nowhere, 4096);
    pcow_map_destroy(map);
    pcow_close(image);
    /* With the last map our handler is gone, the other one is back. */
    assert_int_equal(sigaction(SIGSEGV, &before, &after), 0);
    assert_ptr_equal(after.sa_sigaction, other_handler);
}

static void test_read_only_image_maps_read_only(void **state)
{
    struct sigaction action = {.sa_sigaction = other_handler, .sa_flags = SA_SIGINFO | SA_NODEFER},
                     before;
    pcow_image *image;
    volatile unsigned char *memory;
    pcow_map *map;

    (void)state;
    pcow_close(must_create_overlay(4 * MIB, 0x5a));
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    image = must_open(scratch("top.pcow"), 0);
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    memory = pcow_map_address(map);
    assert_int_equal(memory[MIB], 0x5a);
    seen_address = NULL;
    if (sigsetjmp(recovered, 1) == 0)
        memory[MIB] = 1;
    assert_ptr_equal(seen_address, memory + MIB);
    pcow_map_destroy(map);
    pcow_close(image);
    sigaction(SIGSEGV, &before, NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_absent_memory_reads_zero_and_takes_no_space),
        TEST(test_stores_survive_reopening),
        TEST(test_base_is_never_changed),
        TEST(test_snapshot_freezes_and_revert_restores),
        TEST(test_memory_without_mappings),
        TEST(test_kernel_access_after_resolve),
        TEST(test_what_can_be_stored_to),
        TEST(test_threads_on_the_same_pages),
        TEST(test_foreign_faults_reach_the_previous_handler),
        TEST(test_read_only_image_maps_read_only),
        TEST(test_no_such_engine),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
