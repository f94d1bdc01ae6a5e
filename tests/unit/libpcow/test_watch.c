/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The watch that finds a store of which nobody knows the address. A system call that stores to the
 * range stands for a KVM vCPU: both get EFAULT from a read-only mapping, and both go through
 * userfaultfd.
 */
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"

/* the base; the image on it is twice as large, so half of it is absent memory */
#define BASE_SIZE (8 * MIB)
#define SIZE (2 * BASE_SIZE)
#define FILL 0x5a

static pcow_image *make_image(void)
{
    pcow_image *top = must_create_overlay(BASE_SIZE, FILL);

    MUST(pcow_resize(top, SIZE, false, &error));
    return top;
}

static void finish(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

static unsigned char expected_at(uint64_t offset)
{
    return offset < BASE_SIZE ? FILL : 0;
}

/* Everything as at the beginning, but for one byte. */
static void assert_only_changed(const unsigned char *memory, uint64_t at, unsigned char value)
{
    for (uint64_t offset = 0; offset < SIZE; offset++)
        if (memory[offset] != (offset == at ? value : expected_at(offset)))
            fail_msg("byte 0x%llx is %02x", (unsigned long long)offset, memory[offset]);
}

/* What QEMU does for a vCPU: it comes back with EFAULT, and goes again under watch. */
static void watched_kernel_store(pcow_map *map, uint64_t offset, unsigned char value)
{
    unsigned char *memory = pcow_map_address(map);

    if (kernel_store(memory + offset, value) == 1)
        return;
    assert_int_equal(errno, EFAULT);
    assert_false(pcow_map_is_accessible(map, offset, true));
    MUST(pcow_map_watch(map, &error));
    assert_int_equal(kernel_store(memory + offset, value), 1);
    assert_true(pcow_map_is_accessible(map, offset, true));
}

static void test_a_store_is_found(void **state)
{
    static const uint64_t offsets[] = {0, 3 * MIB + 12345, BASE_SIZE - 1, BASE_SIZE, SIZE - 1};

    (void)state;
    FOR_EACH_ENGINE(engine) {
        for (unsigned i = 0; i < sizeof offsets / sizeof *offsets; i++) {
            pcow_image *image = make_image();
            pcow_map *map = must_map_by(image, engine, 0);
            struct pcow_map_stats stats;
            uint64_t found;

            watched_kernel_store(map, offsets[i], 7);
            pcow_map_get_stats(map, &stats);
            /* One page, or one cluster where nothing was. */
            assert_int_equal(stats.pages_copied, offsets[i] < BASE_SIZE);
            assert_int_equal(stats.pages_zeroed, offsets[i] < BASE_SIZE ? 0 : 16);
            assert_int_equal(stats.watches, 1);
            assert_false(pcow_map_watch_found(map, &found));
            assert_only_changed(pcow_map_address(map), offsets[i], 7);
            pcow_map_get_stats(map, &stats);
            assert_true(count_mappings(pcow_map_address(map), SIZE) <= stats.vmas + 1);
            finish(image, map);
        }
    }
}

/*
 * One store after the other, so that every slab is a mixture of own, old and absent pages, and
 * watches meet the remains of others.
 */
static void test_scattered_stores(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = make_image();
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map), *model = malloc(SIZE);
        uint64_t seed = random_seed();

        assert_non_null(model);
        for (uint64_t offset = 0; offset < SIZE; offset++)
            model[offset] = expected_at(offset);
        for (unsigned i = 0; i < 300; i++) {
            uint64_t offset = random_next(&seed) % SIZE, other = random_next(&seed) % SIZE;

            assert_int_equal(memory[other], model[other]);
            model[offset] = (unsigned char)(i + 1);
            watched_kernel_store(map, offset, model[offset]);
            if (i == 100 || i == 200)
                MUST(pcow_snapshot_create(image, i == 100 ? "one" : "two", &error));
        }
        assert_memory_equal(memory, model, SIZE);
        free(model);
        finish(image, map);
    }
}

struct kernel_storer {
    pthread_t thread;
    unsigned char *address;
};

static void *store_by_kernel(void *opaque)
{
    const struct kernel_storer *storer = opaque;

    return kernel_store(storer->address, 3) == 1 ? NULL : opaque;
}

/*
 * The store is reported, and before it is served somebody else maps all of its slab for stores. The
 * watch has found it, and is over.
 */
static void test_slab_that_becomes_whole(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_KVM, 0);
    unsigned char *memory = pcow_map_address(map);
    struct kernel_storer storer = {.address = memory + 511 * PCOW_PAGE_SIZE};
    void *failed;

    (void)state;
    chain_claim(image->chain, 0);
    assert_int_equal(layout_own(map, 0, 0, 511, NULL), 0);
    assert_int_equal(layout_map_own(map, 0, 0, 511), 0);
    chain_release(image->chain, 0);
    MUST(pcow_map_watch(map, &error));
    chain_claim(image->chain, 0);
    assert_int_equal(pthread_create(&storer.thread, NULL, store_by_kernel, &storer), 0);
    usleep(100000);
    if (!page_set_has(&map->slabs[0].writable, 511)) {
        assert_int_equal(layout_own(map, 0, 511, 1, NULL), 0);
        assert_int_equal(layout_map_own(map, 0, 511, 1), 0);
    }
    chain_release(image->chain, 0);
    pthread_join(storer.thread, &failed);
    assert_null(failed);
    for (unsigned tries = 0; tries < 1000 && __atomic_load_n(&map->watching, __ATOMIC_ACQUIRE);
         tries++)
        usleep(1000);
    assert_false(__atomic_load_n(&map->watching, __ATOMIC_ACQUIRE));
    assert_only_changed(memory, 511 * PCOW_PAGE_SIZE, 3);
    finish(image, map);
}

/* A slab of too many pieces has no mappings at all; a store there is an EFAULT as well. */
static void test_cold_slabs(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map = must_map_by(image, PCOW_ENGINE_KVM, 0);
    unsigned char *memory = pcow_map_address(map);

    (void)state;
    for (uint64_t offset = 0; offset < BASE_SIZE; offset += 128 * KIB)
        memory[offset] = FILL;
    pcow_map_destroy(map);
    map = must_map_by(image, PCOW_ENGINE_KVM, 16);
    memory = pcow_map_address(map);
    assert_false(pcow_map_is_accessible(map, 7 * MIB, false));
    MUST(pcow_map_watch(map, &error));
    assert_int_equal(memory[7 * MIB - 3], FILL);
    assert_int_equal(kernel_store(memory + 7 * MIB, 3), 1);
    assert_only_changed(memory, 7 * MIB, 3);
    finish(image, map);
}

/* Loads of everybody go on, and find what they would have found. */
static void test_loads_under_watch(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = make_image();
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map);
        struct pcow_map_stats stats;
        char buffer[64];
        int fds[2];

        memory[BASE_SIZE - 4096] = FILL;       /* own, and writable */
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.pages_copied, 1);
        MUST(pcow_map_watch(map, &error));
        assert_int_equal(pipe(fds), 0);
        assert_int_equal(write(fds[1], memory + 5 * MIB - 32, 64), 64);
        assert_int_equal(read(fds[0], buffer, 64), 64);
        assert_int_equal(buffer[0], FILL);
        assert_only_changed(memory, SIZE, 0);
        /* to an own page: nobody asked for it, the watch goes on */
        memory[BASE_SIZE - 4095] = FILL;
        assert_only_changed(memory, SIZE, 0);
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.pages_copied, 1);
        assert_int_equal(stats.pages_zeroed, 0);
        watched_kernel_store(map, MIB, 9);
        assert_only_changed(memory, MIB, 9);
        pcow_map_get_stats(map, &stats);
        assert_true(count_mappings(memory, SIZE) <= stats.vmas + 1);
        close(fds[0]);
        close(fds[1]);
        finish(image, map);
    }
}

/* An instruction that loads from the page that it stores to, and one that loads from another. */
static void test_load_and_store_of_one_instruction(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        static const uint64_t distances[] = {100, 4096, 4 * MIB};

        for (unsigned i = 0; i < 3; i++) {
            pcow_image *image = make_image();
            pcow_map *map = must_map_by(image, engine, 0);
            unsigned char *memory = pcow_map_address(map), *from = memory + 2 * MIB,
                          *to = from + distances[i];
            size_t count = 50;

            MUST(pcow_map_watch(map, &error));
            __asm__ volatile("rep movsb" : "+S"(from), "+D"(to), "+c"(count) : : "memory");
            assert_int_equal(count, 0);
            MUST(pcow_map_watch(map, &error));
            __asm__ volatile("lock addb $1, %0" : "+m"(memory[3 * MIB]));
            assert_only_changed(memory, 3 * MIB, FILL + 1);
            finish(image, map);
        }
    }
}

/* ---- snapshots ------------------------------------------------------------------------------- */

/*
 * Freeze and revert while everything is under watch, and while what remains of one has not gone
 * yet.
 */
static void test_snapshots_under_watch(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = make_image(), *view;
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map);

        memory[MIB] = 1;
        MUST(pcow_map_watch(map, &error));
        assert_int_equal(memory[MIB + 4096], FILL);
        MUST(pcow_snapshot_create(image, "one", &error));
        assert_only_changed(memory, MIB, 1);
        memory[MIB] = 2;
        watched_kernel_store(map, MIB + 1, FILL);
        assert_only_changed(memory, MIB, 2);
        MUST(pcow_map_watch(map, &error));
        assert_int_equal(memory[5 * MIB], FILL);
        MUST(pcow_snapshot_revert(image, "one", &error));
        assert_only_changed(memory, MIB, 1);
        watched_kernel_store(map, 6 * MIB, 3);
        MUST(pcow_snapshot_create(image, "two", &error));
        MUST(pcow_map_watch(map, &error));
        memory[6 * MIB] = 4;
        MUST(pcow_snapshot_delete(image, "two", NULL, &error));
        assert_int_equal(memory[6 * MIB], 4);
        MUST(pcow_open(scratch("top.pcow"), PCOW_OPEN_FORCE_SHARE, "one", &view, &error));
        assert_reads(view, MIB, "\1", 1);
        assert_reads(view, 6 * MIB, "\x5a", 1);
        pcow_close(view);
        finish(image, map);
    }
}

/* ---- many threads ---------------------------------------------------------------------------- */

#define THREADS 3
#define ROUNDS 4

struct storer {
    pcow_map *map;
    unsigned number;
    pthread_barrier_t *barrier;
    unsigned long loads;
};

static uint64_t own_offset(uint64_t page, unsigned number)
{
    return page * 4096 + number * 8;
}

/*
 * Each thread stores to its own byte of every second page, by itself or through the kernel, and
 * loads what others may be storing to.
 */
static void *store_everywhere(void *opaque)
{
    struct storer *storer = opaque;
    unsigned char *memory = pcow_map_address(storer->map);

    for (unsigned round = 1; round <= ROUNDS; round++) {
        uint64_t seed = random_seed() + storer->number + round * 100;

        pthread_barrier_wait(storer->barrier);
        for (unsigned i = 0; i < 500; i++) {
            uint64_t page = random_next(&seed) % (SIZE / 4096);
            unsigned char *to = memory + own_offset(page, storer->number);

            storer->loads += *(volatile unsigned char *)(memory + random_next(&seed) % SIZE);
            if (page % 2)
                *(volatile unsigned char *)to = (unsigned char)round;
            else
                while (kernel_store(to, (unsigned char)round) != 1)
                    MUST(pcow_map_watch(storer->map, &error));
        }
        pthread_barrier_wait(storer->barrier);
    }
    return NULL;
}

static void replay(unsigned char *model, unsigned round)
{
    for (unsigned number = 0; number < THREADS; number++) {
        uint64_t seed = random_seed() + number + round * 100;

        for (unsigned i = 0; i < 500; i++) {
            model[own_offset(random_next(&seed) % (SIZE / 4096), number)] = (unsigned char)round;
            random_next(&seed);
        }
    }
}

static void test_threads_and_snapshots(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = make_image();
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map), *model = malloc(SIZE);
        struct storer storers[THREADS];
        pthread_t threads[THREADS];
        pthread_barrier_t barrier;

        assert_non_null(model);
        for (uint64_t offset = 0; offset < SIZE; offset++)
            model[offset] = expected_at(offset);
        pthread_barrier_init(&barrier, NULL, THREADS + 1);
        for (unsigned i = 0; i < THREADS; i++) {
            storers[i] = (struct storer){.map = map, .number = i, .barrier = &barrier};
            assert_int_equal(pthread_create(&threads[i], NULL, store_everywhere, &storers[i]), 0);
        }
        for (unsigned round = 1; round <= ROUNDS; round++) {
            char name[16];

            pthread_barrier_wait(&barrier);
            for (unsigned i = 0; i < 20; i++) {
                MUST(pcow_map_watch(map, &error));
                usleep(500);
            }
            pthread_barrier_wait(&barrier);
            replay(model, round);
            if (round % 2)
                assert_memory_equal(memory, model, SIZE);
            MUST(pcow_map_watch(map, &error));
            snprintf(name, sizeof name, "s%u", round);
            MUST(pcow_snapshot_create(image, name, &error));
        }
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        assert_memory_equal(memory, model, SIZE);
        pthread_barrier_destroy(&barrier);
        pcow_map_destroy(map);
        assert_reads(image, 0, model, SIZE);
        free(model);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        unlink(scratch("top.pcow"));
        unlink(scratch("base.pcow"));
    }
}

static void test_read_only_image(void **state)
{
    pcow_image *image = make_image();
    pcow_map *map;

    (void)state;
    pcow_close(image);
    image = must_open(scratch("top.pcow"), 0);
    map = must_map_by(image, PCOW_ENGINE_KVM, 0);
    MUST_FAIL(-EROFS, pcow_map_watch(map, &error));
    assert_true(pcow_map_is_accessible(map, 0, false));
    assert_false(pcow_map_is_accessible(map, 0, true));
    assert_false(pcow_map_is_accessible(map, SIZE, false));
    finish(image, map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_store_is_found, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_scattered_stores, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_slab_that_becomes_whole, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_cold_slabs, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_loads_under_watch, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_load_and_store_of_one_instruction, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_snapshots_under_watch, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_threads_and_snapshots, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_read_only_image, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
