/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Slabs prepared ahead of the stores: that they are used, that they are given back, and that they
 * never show anything but zeros.
 */
#include "support.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "image/prepare.h"
#include "image/remains.h"
#include "monitor/monitor.h"

#define SLAB PCOW_SLAB_SIZE

/* 64 MiB: small enough to be filled, large enough for slabs to be prepared in it. */
static int pool_setup(void **state)
{
    return pool_mount(state, "64m");
}

static pcow_map *must_map(pcow_image *image, unsigned prepared_slabs)
{
    struct pcow_map_options options = {.prepared_slabs = prepared_slabs,
                                       .full_policy = PCOW_FULL_FAIL};
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    return map;
}

static struct pcow_map_stats stats_of(pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats;
}

static void wait_ready(pcow_map *map, unsigned slabs)
{
    for (unsigned i = 0;
         i < 2000 && (stats_of(map).slabs_ready < slabs || stats_of(map).slabs_queued > 0); i++)
        usleep(5000);
    assert_true(stats_of(map).slabs_ready >= slabs);
}

static uint64_t allocated(pcow_image *image)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    return info.allocated_size;
}

static void test_stores_take_prepared_slabs(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    pcow_map *map = must_map(image, 8);
    unsigned char *memory = pcow_map_address(map);

    wait_ready(map, 8);
    for (unsigned i = 0; i < 8; i++)
        memory[i * SLAB + 12345] = (unsigned char)(i + 1);
    assert_int_equal(stats_of(map).slabs_missed, 0);
    /* They come in order, so that neighbours in the guest are neighbours in the file. */
    for (unsigned i = 1; i < 8; i++)
        assert_int_equal(slab_ref_slab(image->chain->head[i]),
                         slab_ref_slab(image->chain->head[0]) + i);
    for (uint64_t offset = 0; offset < 8 * SLAB; offset++)
        if (memory[offset] != (offset % SLAB == 12345 ? offset / SLAB + 1 : 0))
            fail_msg("byte %llu is %u", (unsigned long long)offset, memory[offset]);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static void test_what_is_not_used_is_given_back(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    uint64_t before = allocated(image);
    pcow_map *map = must_map(image, 8);
    unsigned char *memory = pcow_map_address(map);

    wait_ready(map, 8);
    assert_true(allocated(image) >= before + 8 * SLAB);
    memory[0] = 1;
    memory[4 * SLAB] = 1;
    pcow_map_destroy(map);
    /* Two clusters and their metadata are all that stays. */
    assert_true(allocated(image) <= before + 2 * 64 * KIB + 64 * KIB);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/*
 * The map goes at any moment of what the thread does with the slab of a store, which has its blocks
 * before they count as prepared.
 */
static void test_half_prepared_is_given_back(void **state)
{
    (void)state;
    for (unsigned round = 0; round < 50; round++) {
        pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
        uint64_t before = allocated(image);
        pcow_map *map = must_map(image, 0);
        volatile unsigned char *memory = pcow_map_address(map);

        for (unsigned i = 0; i < 4; i++)
            memory[i * SLAB] = 1;
        usleep(round * 20);
        pcow_map_destroy(map);
        assert_in_range(allocated(image), before, before + 4 * 64 * KIB + 64 * KIB);
        pcow_close(image);
        unlink(scratch("top.pcow"));
    }
}

static void test_idle_image_gives_back(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    uint64_t before = allocated(image);
    pcow_map *map = must_map(image, 0);
    unsigned char *memory = pcow_map_address(map);
    bool given_back = false;

    memory[0] = 1;
    wait_ready(map, 1);
    assert_true(allocated(image) >= before + SLAB);
    for (unsigned i = 0; i < 200 && !given_back; i++) {
        usleep(100000);
        given_back = stats_of(map).slabs_ready == 0 && allocated(image) <= before + 2 * 64 * KIB;
    }
    assert_true(given_back);
    /* What was trimmed is a hole again: the next stores find zeros around them. */
    memory[SLAB - 1] = 2;
    memory[SLAB] = 3;
    for (uint64_t offset = 0; offset < 2 * SLAB; offset++)
        if (memory[offset] != (offset == 0 ? 1 : offset == SLAB - 1 ? 2 : offset == SLAB ? 3 : 0))
            fail_msg("byte %llu is %u", (unsigned long long)offset, memory[offset]);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/*
 * Others fill the pool while slabs are prepared and partly used: stores go on with what was
 * prepared, until all of it is used.
 */
static void test_full_pool_reclaims_what_was_prepared(void **state)
{
    char path[600];
    pcow_image *image;
    pcow_map *map;
    unsigned char *memory;
    uint64_t done = 0;
    int ret = 0;

    (void)state;
    snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
    image = must_create(path, 128 * MIB, 0, NULL);
    map = must_map(image, 1);
    memory = pcow_map_address(map);
    wait_ready(map, 1);
    /* One page here and there: most of what these slabs hold is prepared and not used. */
    for (unsigned i = 0; i < 6; i++) {
        memory[i * SLAB] = 9;
        wait_ready(map, 1);
    }
    pool_fill();
    /* Elsewhere, so that it has to come from what the others do not use. */
    for (uint64_t offset = 16 * SLAB; offset < 64 * SLAB && ret == 0; offset += 64 * KIB) {
        ret = pcow_map_resolve(map, offset, 1, true, NULL);
        if (ret == 0) {
            memory[offset] = 7;
            done += 64 * KIB;
        }
    }
    assert_int_equal(ret, -ENOSPC);
    assert_true(done >= 5 * SLAB);
    for (uint64_t offset = 16 * SLAB; offset < 16 * SLAB + done; offset += 4096)
        assert_int_equal(memory[offset], offset % (64 * KIB) ? 0 : 7);
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(memory[i * SLAB], 9);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path);
    unlink(path);
}

static void test_nothing_is_prepared_in_a_nearly_full_pool(void **state)
{
    char path[600];
    pcow_image *image;
    pcow_map *map;

    (void)state;
    snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
    image = must_create(path, 32 * MIB, 0, NULL);
    pool_fill();
    /* Room for the tables and some clusters, not for slabs. */
    snprintf(path, sizeof path, "%s/filler", pool_directory());
    assert_int_equal(truncate(path, 60 * (off_t)MIB), 0);
    map = must_map(image, 4);
    ((unsigned char *)pcow_map_address(map))[0] = 1;
    usleep(200000);
    assert_int_equal(stats_of(map).slabs_ready, 0);
    assert_int_equal(stats_of(map).slabs_prepared, 0);
    pcow_map_destroy(map);
    pcow_close(image);
    snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
    must_be_clean(path);
    unlink(path);
}

/*
 * Killed while slabs are prepared, owned or not: nothing is lost, nothing but zeros shows, and the
 * next writer gives the blocks back.
 */
static void test_crash_with_prepared_slabs(void **state)
{
    const char *path = scratch("top.pcow");
    struct pcow_check_result result;
    unsigned char *bytes = calloc(1, 64 * MIB);
    pcow_image *image;
    pcow_map *map;
    int pipes[2], status;
    char byte;
    pid_t pid;

    (void)state;
    assert_non_null(bytes);
    pcow_close(must_create(path, 64 * MIB, 0, NULL));
    assert_int_equal(pipe(pipes), 0);
    pid = fork();
    if (pid == 0) {
        struct pcow_map_options options = {.prepared_slabs = 8};

        if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, NULL)
            || pcow_map_create(image, &options, &map, NULL))
            _exit(1);
        while (stats_of(map).slabs_ready < 8)
            usleep(1000);
        for (unsigned i = 0; i < 3; i++)
            ((unsigned char *)pcow_map_address(map))[i * SLAB + 77] = 5;
        if (write(pipes[1], "x", 1) != 1)
            _exit(2);
        pause();
    }
    assert_int_equal(read(pipes[0], &byte, 1), 1);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(pipes[0]);
    close(pipes[1]);
    MUST(pcow_check(path, 0, NULL, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
    for (unsigned i = 0; i < 3; i++)
        bytes[i * SLAB + 77] = 5;
    image = must_open(path, PCOW_OPEN_WRITE);
    assert_reads(image, 0, bytes, 64 * MIB);
    map = must_map(image, 0);
    ((unsigned char *)pcow_map_address(map))[20 * MIB] = 1;
    bytes[20 * MIB] = 1;
    for (unsigned i = 0; i < 400 && stats_of(map).slabs_ready == 0; i++)
        usleep(5000);
    assert_memory_equal(pcow_map_address(map), bytes, 64 * MIB);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path);
    free(bytes);
}

static void test_sequence_grows_but_stays_inside(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 6 * MIB, 0, NULL);
    pcow_map *map = must_map(image, 2);
    unsigned char *memory = pcow_map_address(map);
    struct pcow_info info;

    wait_ready(map, 2);
    for (uint64_t offset = 0; offset < 6 * MIB; offset += 4096)
        memory[offset] = (unsigned char)(offset / 4096 % 255 + 1);
    /* A trap for each cluster would be 96. */
    assert_true(stats_of(map).write_traps <= 3 * 8);
    for (uint64_t offset = 0; offset < 6 * MIB; offset += 4096)
        assert_int_equal(memory[offset], offset / 4096 % 255 + 1);
    pcow_get_info(image, &info);
    assert_int_equal(info.data_size, 6 * MIB);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static pcow_image *make_overlay(uint64_t size)
{
    pcow_image *base = must_create(scratch("base.pcow"), size, 0, NULL);
    unsigned char *bytes = malloc(size);

    assert_non_null(bytes);
    for (uint64_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(i / 4096 * 7 + i);
    MUST(pcow_write(base, 0, bytes, size, &error));
    pcow_close(base);
    free(bytes);
    return must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
}

/*
 * A slab that was stored to again and again is copied whole behind the guest's back, and is one
 * mapping then.
 */
static void test_hot_slab_is_completed(void **state)
{
    (void)state;
    pcow_image *image = make_overlay(4 * SLAB);
    pcow_map *map = must_map(image, 2);
    unsigned char *memory = pcow_map_address(map);
    struct pcow_info info;
    uint64_t offset = 0;

    wait_ready(map, 2);
    /* Not in order, which would be a sequence and nothing to complete. */
    for (unsigned i = 0; i < 24; i++) {
        offset = i * 5 % 32 * 64 * KIB;
        memory[offset] = 0xee;
        memory[offset + 4096] = 0xee;
    }
    for (unsigned i = 0; i < 1000 && stats_of(map).slabs_completed == 0; i++)
        usleep(5000);
    assert_int_equal(stats_of(map).slabs_completed, 1);
    pcow_get_info(image, &info);
    assert_int_equal(info.data_size, SLAB);
    chain_claim(image->chain, 0);      /* the thread has counted it, and let the slab go */
    assert_int_equal(map->slabs[0].pieces, 1);
    chain_release(image->chain, 0);
    for (unsigned i = 0; i < 24; i++)
        memory[i * 5 % 32 * 64 * KIB] = memory[i * 5 % 32 * 64 * KIB + 4096] =
            (unsigned char)(i * 5 % 32 * 16 * 7);
    for (uint64_t i = 0; i < 4 * SLAB; i++)
        if (i / 4096 % 16 > 1 && memory[i] != (unsigned char)(i / 4096 * 7 + i))
            fail_msg("byte %llu is %u", (unsigned long long)i, memory[i]);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

/*
 * The base is cut short under us: the copy is an error, not a signal in the middle of the copy, and
 * the page is not own.
 */
static void test_unreadable_source_is_an_error(void **state)
{
    (void)state;
    pcow_image *image = make_overlay(4 * SLAB);
    pcow_map *map = must_map(image, 2);
    struct pcow_error told = {0};

    wait_ready(map, 2);
    assert_int_equal(truncate(scratch("base.pcow"), 4 * (off_t)SLAB), 0);
    assert_int_equal(pcow_map_resolve(map, 3 * SLAB, 4096, true, &told), -EIO);
    assert_true(told.message[0] != 0);
    map->slabs[3].faults = 1;          /* hot: a cluster, which is copied in another way */
    assert_int_equal(pcow_map_resolve(map, 3 * SLAB, 4096, true, &told), -EIO);
    assert_false(page_set_has(&map->slabs[3].writable, 0));
    /* What is there can still be copied. */
    MUST(pcow_map_resolve(map, 0, 4096, true, &error));
    pcow_map_destroy(map);
    pcow_close(image);
    unlink(scratch("base.pcow"));
}

/* ---- many threads ---------------------------------------------------------------------------- */

#define THREADS 4
#define RACE_SLABS 12u

struct racer {
    unsigned char *memory;
    unsigned number;
    pthread_barrier_t *barrier;
};

static void *race(void *opaque)
{
    struct racer *racer = opaque;

    pthread_barrier_wait(racer->barrier);
    for (uint64_t offset = 0; offset < RACE_SLABS * SLAB; offset += 4096)
        racer->memory[offset + racer->number * 8] = (unsigned char)(racer->number + 1);
    return NULL;
}

/*
 * All store to every page at the same time, with snapshots' worth of slabs taken from the ring: a
 * page is copied once, a slab taken once.
 */
static void test_threads_share_the_ring(void **state)
{
    (void)state;
    pcow_image *image = make_overlay(RACE_SLABS / 2 * SLAB);
    struct racer racers[THREADS];
    pthread_t threads[THREADS];
    pthread_barrier_t barrier;
    struct pcow_info info;
    unsigned char *memory;
    pcow_map *map;

    MUST(pcow_resize(image, RACE_SLABS * SLAB, false, &error));
    map = must_map(image, 4);
    memory = pcow_map_address(map);
    wait_ready(map, 4);
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (unsigned i = 0; i < THREADS; i++) {
        racers[i] = (struct racer){memory, i, &barrier};
        assert_int_equal(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    for (uint64_t offset = 0; offset < RACE_SLABS * SLAB; offset += 4096)
        for (unsigned i = 0; i < 64; i++) {
            uint64_t at = offset + i;
            unsigned char old =
                offset < RACE_SLABS / 2 * SLAB ? (unsigned char)(at / 4096 * 7 + at) : 0;

            if (memory[at] != (i % 8 == 0 && i / 8 < THREADS ? i / 8 + 1 : old))
                fail_msg("byte %llu is %u", (unsigned long long)at, memory[at]);
        }
    pcow_get_info(image, &info);
    assert_int_equal(info.data_size, RACE_SLABS * SLAB);
    assert_int_equal(stats_of(map).pages_copied + stats_of(map).pages_zeroed,
                     RACE_SLABS * PAGES_PER_SLAB);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

/*
 * Snapshots while the thread works: what it completes belongs to the layer that was active, and
 * reverting gives back every byte.
 */
static void test_snapshots_while_the_thread_works(void **state)
{
    (void)state;
    pcow_image *image = make_overlay(4 * SLAB);
    pcow_map *map = must_map(image, 2);
    unsigned char *memory = pcow_map_address(map), *saved = malloc(4 * SLAB);
    uint64_t seed = random_seed();

    assert_non_null(saved);
    for (unsigned round = 0; round < 40; round++) {
        char name[16];

        snprintf(name, sizeof name, "s%u", round);
        for (unsigned i = 0; i < 40; i++)
            memory[random_next(&seed) % (4 * SLAB)] = (unsigned char)round;
        memcpy(saved, memory, 4 * SLAB);
        MUST(pcow_snapshot_create(image, name, &error));
        for (unsigned i = 0; i < 120; i++)
            memory[random_next(&seed) % (4 * SLAB)] = 0xdd;
        MUST(pcow_snapshot_revert(image, name, &error));
        assert_memory_equal(memory, saved, 4 * SLAB);
        if (round % 2)
            MUST(pcow_snapshot_delete(image, name, NULL, &error));
    }
    pcow_map_destroy(map);
    assert_reads(image, 0, saved, 4 * SLAB);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
    free(saved);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)
#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_stores_take_prepared_slabs),
        TEST(test_what_is_not_used_is_given_back),
        TEST(test_half_prepared_is_given_back),
        TEST(test_idle_image_gives_back),
        POOL_TEST(test_full_pool_reclaims_what_was_prepared),
        POOL_TEST(test_nothing_is_prepared_in_a_nearly_full_pool),
        TEST(test_crash_with_prepared_slabs),
        TEST(test_sequence_grows_but_stays_inside),
        TEST(test_hot_slab_is_completed),
        TEST(test_unreadable_source_is_an_error),
        TEST(test_threads_share_the_ring),
        TEST(test_snapshots_while_the_thread_works),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
