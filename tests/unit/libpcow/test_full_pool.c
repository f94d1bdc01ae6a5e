/* SPDX-License-Identifier: BSD-3-Clause */
/* A full pool, seen from the map: a small tmpfs, which needs root. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "operations/operations.h"

static int pool_setup(void **state)
{
    return pool_mount(state, "4m");
}

/* The others give back what they had taken. */
static void empty_pool(void)
{
    char path[600];

    snprintf(path, sizeof path, "%s/filler", pool_directory());
    unlink(path);
}

struct writer {
    unsigned char *memory;
    uint64_t size;
    _Atomic uint64_t done;
};

static void *write_all(void *opaque)
{
    struct writer *writer = opaque;

    for (uint64_t offset = 0; offset < writer->size; offset += 4096) {
        memset(writer->memory + offset, (int)(offset / 4096 % 251 + 1), 4096);
        atomic_store(&writer->done, offset + 4096);
    }
    return NULL;
}

static void test_full_pool_waits_and_goes_on(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        char path[600];
        pcow_image *image;
        struct pcow_event event = {0};
        struct writer writer;
        uint64_t stuck_at;
        pthread_t thread;
        pcow_map *map;
        int ret = 0;

        snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
        image = must_create(path, 8 * MIB, 0, NULL);
        map = must_map_by(image, engine, 0);
        writer = (struct writer){.memory = pcow_map_address(map), .size = 8 * MIB};
        assert_int_equal(pthread_create(&thread, NULL, write_all, &writer), 0);
        for (unsigned i = 0; i < 1000 && !pcow_map_next_event(map, &event); i++)
            usleep(10000);
        assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
        assert_int_equal(event.error, -ENOSPC);
        usleep(50000);
        stuck_at = atomic_load(&writer.done);
        assert_true(stuck_at > 0 && stuck_at < 8 * MIB);
        /*
         * A store from the kernel's side is told instead of waiting. What the thread was about to
         * prepare when the pool became full comes back a little later, on a busy machine after this
         * has begun: it serves a cluster or two.
         */
        for (unsigned cluster = 1; cluster <= 8 && ret != -ENOSPC; cluster++) {
            ret = pcow_map_resolve(map, 8 * MIB - cluster * 64 * KIB, 4096, true, NULL);
            usleep(50000);
        }
        assert_int_equal(ret, -ENOSPC);
        MUST_FAIL(-EBUSY, pcow_write(image, 7 * MIB, "x", 1, &error));
        pool_resize("32m");
        pthread_join(thread, NULL);
        event.kind = 0;
        while (pcow_map_next_event(map, &event))
            ;
        assert_int_equal(event.kind, PCOW_EVENT_POOL_RESUMED);
        for (uint64_t i = 0; i < 8 * MIB; i++)
            assert_int_equal(writer.memory[i], i / 4096 % 251 + 1);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(path);
        unlink(path);
        pool_resize("4m");
    }
}

#define WRITER(i) (((i) ? 5 : 3) * MIB)

/* All but two pages: also what the thread that works ahead comes back with after a while. */
static void use_up(pcow_map *map)
{
    struct pcow_map_stats before, now;

    for (unsigned idle = 0; idle < 3;) {
        pcow_map_get_stats(map, &before);
        for (uint64_t at = 0; at < 8 * MIB; at += 4096)
            if (at != WRITER(0) && at != WRITER(1))
                pcow_map_resolve(map, at, 1, true, NULL);
        usleep(50000);
        pcow_map_get_stats(map, &now);
        idle = now.pages_zeroed == before.pages_zeroed ? idle + 1 : 0;
    }
}

/* Two wait, and there is space for one: nobody is told that stores go on. */
static void test_one_of_two_goes_on(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct writer writers[2];
        pthread_t threads[2];
        struct pcow_map_stats stats = {0};
        struct pcow_event event;
        unsigned char *memory;
        unsigned full = 0;
        char path[600];
        pcow_image *image;
        pcow_map *map;

        snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
        image = must_create(path, 8 * MIB, 4096, NULL);
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        memory[0] = 1;
        pool_fill();
        use_up(map);
        for (unsigned i = 0; i < 2; i++) {
            writers[i] = (struct writer){.memory = memory + WRITER(i), .size = 4096};
            assert_int_equal(pthread_create(&threads[i], NULL, write_all, &writers[i]), 0);
        }
        for (unsigned i = 0; i < 1000 && stats.stores_waiting < 2; i++) {
            usleep(10000);
            pcow_map_get_stats(map, &stats);
        }
        assert_int_equal(stats.stores_waiting, 2);
        /* page by page */
        while (stats.stores_waiting == 2) {
            struct stat st;

            assert_int_equal(stat(path_in_pool("filler"), &st), 0);
            assert_true(st.st_size > 0);
            assert_int_equal(truncate(path_in_pool("filler"), st.st_size - 4096), 0);
            usleep(30000);
            pcow_map_get_stats(map, &stats);
        }
        if (stats.stores_waiting == 1) {
            while (pcow_map_next_event(map, &event)) {
                assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
                full++;
            }
            assert_int_equal(full, 2);
        }
        empty_pool();
        for (unsigned i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
        event.kind = 0;
        while (pcow_map_next_event(map, &event))
            ;
        assert_int_equal(event.kind, PCOW_EVENT_POOL_RESUMED);
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.stores_waiting, 0);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(path);
        unlink(path);
    }
}

/* As "cp --sparse=always" and others do: pages of zeros have no blocks in the copy. */
static void copy_without_zeros(const char *from, const char *to)
{
    static const char zeros[4096];
    char page[4096];
    struct stat st;
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

    assert_true(in >= 0 && out >= 0 && fstat(in, &st) == 0 && ftruncate(out, st.st_size) == 0);
    for (off_t at = 0; at < st.st_size; at += (off_t)sizeof page) {
        assert_int_equal(pread(in, page, sizeof page, at), sizeof page);
        if (memcmp(page, zeros, sizeof page))
            assert_int_equal(pwrite(out, page, sizeof page, at), sizeof page);
    }
    close(in);
    close(out);
}

/*
 * Pages of zeros that are valid need not have blocks: in a copy, or when they were zeroed. A store
 * to one on a full pool has to wait for space as any other; mapped as it is, it would be SIGBUS,
 * and under KVM a vCPU that tries for ever without leaving the kernel.
 */
static void test_full_pool_and_pages_without_blocks(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned zeroed = 0; zeroed < 2; zeroed++) {
            char path[600], first[600];
            unsigned char *memory;
            pcow_image *image;
            pcow_map *map;

            snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
            snprintf(first, sizeof first, "%s", scratch("first.pcow"));
            image = must_create(zeroed ? path : first, 8 * MIB, 0, NULL);
            /* One page of each cluster; the others of it become valid as well. */
            map = must_map_by(image, engine, 0);
            for (uint64_t offset = 0; offset < MIB; offset += 64 * KIB)
                ((unsigned char *)pcow_map_address(map))[offset] = 1;
            pcow_map_destroy(map);
            if (zeroed)
                MUST(pcow_write_zeroes(image, 64 * KIB + 4096, MIB - 128 * KIB - 4096, &error));
            pcow_close(image);
            if (!zeroed)
                copy_without_zeros(first, path);
            image = must_open(path, PCOW_OPEN_WRITE);
            map = must_map_by(image, engine, 0);
            memory = pcow_map_address(map);
            pool_fill();
            for (uint64_t offset = 64 * KIB + 4096; offset < 128 * KIB; offset += 4096) {
                assert_false(pcow_map_is_accessible(map, offset, true));
                assert_int_equal(pcow_map_resolve(map, offset, 4096, true, NULL), -ENOSPC);
                assert_false(pcow_map_is_accessible(map, offset, true));
            }
            /* What has a block can be stored to. */
            MUST(pcow_map_resolve(map, 0, 4096, true, &error));
            memory[0] = 2;
            pool_resize("32m");
            memory[64 * KIB + 4096] = 3;
            assert_true(pcow_map_is_accessible(map, 96 * KIB, true));
            assert_false(pcow_map_is_accessible(map, 6 * MIB, true));
            /* And from then on it does not matter how full the pool is. */
            pool_fill();
            for (uint64_t offset = 64 * KIB; offset < MIB; offset += 4096)
                memory[offset + 5] = 4;
            for (uint64_t i = 64 * KIB; i < MIB; i++) {
                unsigned char expected =
                    i % 4096 == 5                                                      ? 4
                    : i == 64 * KIB + 4096                                             ? 3
                    : i % (64 * KIB) || (zeroed && i > 64 * KIB && i < MIB - 64 * KIB) ? 0
                                                                                       : 1;

                if (memory[i] != expected)
                    fail_msg("byte %llu is %u, not %u", (unsigned long long)i, memory[i], expected);
            }
            assert_int_equal(memory[0], 2);
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(path);
            unlink(path);
            unlink(first);
            empty_pool();
            pool_resize("4m");
        }
}

static void test_snapshot_on_a_full_pool_changes_nothing(void **state)
{
    char path[600], buffer[4096] = {1};
    struct pcow_snapshot *list;
    pcow_image *image;
    size_t count;
    int ret = 0;

    (void)state;
    snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
    image = must_create(path, 8 * MIB, 0, NULL);
    MUST(pcow_write(image, 0, buffer, sizeof buffer, &error));
    pool_fill();
    /*
     * The first page of layer records exists, so many snapshots still fit; then the next page is
     * needed.
     */
    for (unsigned i = 0; i < 200 && ret == 0; i++) {
        struct pcow_error error;
        char name[32];

        snprintf(name, sizeof name, "s%u", i);
        ret = pcow_snapshot_create(image, name, &error);
        if (ret)
            assert_non_null(strstr(error.message, "free space in the pool"));
    }
    assert_int_equal(ret, -ENOSPC);
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    free(list);
    MUST(pcow_snapshot_revert(image, "s0", &error));
    assert_reads(image, 0, buffer, sizeof buffer);
    empty_pool();
    MUST(pcow_snapshot_create(image, "later", &error));
    pcow_close(image);
    must_be_clean(path);
    unlink(path);
}

/*
 * Whatever records are free, the one that a revert takes has blocks: 16 are in a page, and which is
 * the next is not the one behind.
 */
static void test_revert_on_a_full_pool(void **state)
{
    (void)state;
    for (unsigned snapshots = 12; snapshots < 20; snapshots++)
        for (unsigned reverts = 0; reverts < 3; reverts++) {
            char path[600], name[32];
            pcow_image *image;

            snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
            image = must_create(path, 8 * MIB, 0, NULL);
            for (unsigned i = 0; i < snapshots; i++) {
                snprintf(name, sizeof name, "s%u", i);
                MUST(pcow_snapshot_create(image, name, &error));
            }
            for (unsigned i = 0; i < reverts; i++)
                MUST(pcow_snapshot_revert(image, "s1", &error));
            MUST(pcow_snapshot_create(image, "last", &error));
            pool_fill();
            for (unsigned i = 0; i < 3; i++)
                MUST(pcow_snapshot_revert(image, "s3", &error));
            pcow_close(image);
            must_be_clean(path);
            unlink(path);
            empty_pool();
        }
}

/*
 * What snapshots and reverts have left in the file is space for every store to it, also of VM state
 * and of zeros that hide the base, and so is what was prepared and not used.
 */
static void test_remains_are_space(void **state)
{
    static unsigned char data[MIB];
    static const unsigned char zeros[64 * KIB];
    char path[600], base[600];
    struct pcow_create_options options = {0};
    pcow_image *image;

    (void)state;
    memset(data, 5, sizeof data);
    snprintf(base, sizeof base, "%s/base.pcow", pool_directory());
    image = must_create(base, 8 * MIB, 0, NULL);
    MUST(pcow_write(image, 4 * MIB, data, 64 * KIB, &error));
    pcow_close(image);
    for (unsigned zeroes = 0; zeroes < 2; zeroes++) {
        snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
        options.base = base;
        MUST(pcow_create(path, &options, &error));
        image = must_open(path, PCOW_OPEN_WRITE);
        MUST(pcow_snapshot_create(image, "s", &error));
        /* A free slab that has little, and one that has what is needed. */
        MUST(pcow_write(image, 0, data, 4 * KIB, &error));
        MUST(pcow_write(image, 2 * MIB, data, sizeof data, &error));
        MUST(pcow_snapshot_revert(image, "s", &error));
        pool_fill();
        if (zeroes) {
            MUST(pcow_write_zeroes(image, 4 * MIB, 64 * KIB, &error));
            assert_reads(image, 4 * MIB, zeros, sizeof zeros);
        } else {
            MUST(pcow_snapshot_write_state(image, "s", 0, data, 64 * KIB, &error));
            MUST(pcow_snapshot_set_state_size(image, "s", 64 * KIB, &error));
        }
        pcow_close(image);
        empty_pool();
        must_be_clean(path);
        unlink(path);
    }
}

/*
 * The watch says where the store is, and everybody else goes on: only the one who stores waits, and
 * where it can be stopped.
 */
static void test_the_watch_goes_on(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct pcow_map_stats stats;
        char path[600];
        pcow_image *image;
        pcow_map *map;
        unsigned char *memory;
        uint64_t offset = 0, found;

        snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
        image = must_create(path, 16 * MIB, 0, NULL);
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        /*
         * Full for good: the thread that works ahead may just be giving back a slab that it could
         * not finish.
         */
        for (unsigned refused = 0; refused < 5;) {
            if (pcow_map_resolve(map, offset, 1, true, NULL) == 0) {
                memory[offset] = 1;
                offset += 4096;
                refused = 0;
            } else {
                refused++;
                usleep(20000);
            }
        }
        assert_true(offset > MIB && offset < 4 * MIB);
        MUST(pcow_map_watch(map, &error));
        assert_int_equal(kernel_store(memory + offset + 5, 2), -1);
        assert_int_equal(errno, EFAULT);
        assert_int_equal(memory[offset + 5], 0);
        assert_int_equal(memory[15 * MIB], 0);
        assert_int_equal(memory[0], 1);
        assert_true(pcow_map_watch_found(map, &found));
        assert_int_equal(found, offset);
        assert_int_equal(pcow_map_resolve(map, offset, 1, true, NULL), -ENOSPC);
        pool_resize("32m");
        MUST(pcow_map_resolve(map, offset, 1, true, &error));
        assert_int_equal(kernel_store(memory + offset + 5, 2), 1);
        assert_int_equal(memory[offset + 5], 2);
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.pool_full_waits, 0);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(path);
        unlink(path);
        pool_resize("4m");
    }
}

#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

/* A file system that has no block for data, and takes its time to sync. */
struct full {
    struct observer observer;
    unsigned refused, syncs;
};

static int look_full(struct observer *observer, const struct observation *seen)
{
    struct full *full = (struct full *)observer;

    full->syncs += seen->what == OBSERVED_SYNC;
    if ((seen->what != OBSERVED_WRITE && seen->what != OBSERVED_ALLOCATE)
        || seen->offset < PCOW_SLAB_SIZE)
        return 0;
    full->refused++;
    return -ENOSPC;
}

/* A guest that stores again and again while the pool is full would sync as often. */
static void test_refused_stores_sync_nothing(void **state)
{
    static const char page[4096] = {1};
    struct full full = {.observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE,
                                     .look = look_full}};
    pcow_image *image;

    (void)state;
    pcow_close(must_create(scratch("top.pcow"), 64 * MIB, 0, NULL));
    MUST(image_open(scratch("top.pcow"), PCOW_OPEN_WRITE, NULL, &full.observer, &image, &error));
    MUST_FAIL(-ENOSPC, pcow_write(image, 0, page, sizeof page, &error));
    full.refused = full.syncs = 0;
    for (unsigned i = 0; i < 20; i++)
        MUST_FAIL(-ENOSPC, pcow_write(image, i * PCOW_SLAB_SIZE, page, sizeof page, &error));
    assert_true(full.refused >= 20);
    assert_int_equal(full.syncs, 0);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_full_pool_waits_and_goes_on),
        POOL_TEST(test_one_of_two_goes_on),
        POOL_TEST(test_full_pool_and_pages_without_blocks),
        POOL_TEST(test_snapshot_on_a_full_pool_changes_nothing),
        POOL_TEST(test_revert_on_a_full_pool),
        POOL_TEST(test_remains_are_space),
        POOL_TEST(test_the_watch_goes_on),
        cmocka_unit_test_setup_teardown(test_refused_stores_sync_nothing, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
