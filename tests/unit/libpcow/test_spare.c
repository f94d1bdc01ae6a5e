/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What is kept for the last snapshot of a guest: it is taken when the pool is full to the last
 * block, and nobody else gets what it needs. The pools are small ones of the test, which needs
 * root.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chain/reclaim.h"

#define SIZE (8 * MIB)
#define STATE (3 * MIB + 123)
#define SLABS 3u                       /* of that state, and the loan */

static pcow_image *image;
static pcow_map *map;
static volatile unsigned char *memory;

static int tmpfs(void **state)
{
    return pool_mount(state, "32m");
}

static int large_tmpfs(void **state)
{
    return pool_mount(state, "128m");
}

static int ext4(void **state)
{
    return pool_mount_disk(state, "mkfs.ext4 -q -b 4096", "96M");
}

static int ext4_of_small_blocks(void **state)
{
    return pool_mount_disk(state, "mkfs.ext4 -q -b 1024", "96M");
}

static int xfs(void **state)
{
    return pool_mount_disk(state, "mkfs.xfs -q -m reflink=0", "320M");
}

static const char *path(void)
{
    static char text[600];

    snprintf(text, sizeof text, "%s/top.pcow", pool_directory());
    return text;
}

static void begin(enum pcow_engine engine)
{
    image = must_create(path(), SIZE, 0, NULL);
    map = must_map_by(image, engine, 0);
    memory = pcow_map_address(map);
    memset((void *)(uintptr_t)memory, 1, SIZE / 2);
}

static void end(void)
{
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path());
    unlink(path());
}

static struct pcow_map_stats stats_of(void)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats;
}

static uint64_t allocated(void)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    return info.allocated_size;
}

/* Without what is prepared for the guest. */
static uint64_t used(void)
{
    return allocated() - stats_of().slabs_ready * PCOW_SLAB_SIZE;
}

static void wait_for(unsigned slabs)
{
    for (unsigned i = 0; i < 1000 && stats_of().slabs_spare != slabs; i++)
        usleep(10000);
    assert_int_equal(stats_of().slabs_spare, slabs);
}

/* Block by block, and again, as a journal keeps what was freed for a while. */
static void fill_pool(void)
{
    uint64_t before = UINT64_MAX;
    struct statvfs fs;
    char filler[600];

    snprintf(filler, sizeof filler, "%s/filler", pool_directory());
    for (;;) {
        off_t end;
        int fd;

        pool_fill();
        fd = open(filler, O_WRONLY | O_CLOEXEC);
        assert_true(fd >= 0);
        end = lseek(fd, 0, SEEK_END);
        while (posix_fallocate(fd, end, 1024) == 0)
            end += 1024;
        assert_int_equal(syncfs(fd), 0);
        close(fd);
        assert_int_equal(statvfs(pool_directory(), &fs), 0);
        if (fs.f_bfree == before)
            return;
        before = fs.f_bfree;
    }
}

/* To the last block: with what was prepared for the guest, which a full pool gets back. */
static void fill(void)
{
    for (unsigned i = 0; i < 3; i++) {
        fill_pool();
        usleep(20000);
        reclaim_for_space(image);
    }
    fill_pool();
}

static void make_room(void)
{
    char filler[600];

    snprintf(filler, sizeof filler, "%s/filler", pool_directory());
    unlink(filler);
}

static unsigned char state_byte(size_t at)
{
    return (unsigned char)(at * 7 + at / 4096);
}

/* All of it, or the first error. */
static int take_with(const char *name, size_t size)
{
    unsigned char *bytes = malloc(size);
    struct pcow_error failed = {0};
    uint64_t token;
    int ret;

    assert_non_null(bytes);
    for (size_t i = 0; i < size; i++)
        bytes[i] = state_byte(i);
    while ((ret = pcow_snapshot_prepare(image, name, 1, 2, &token, &failed)) == PCOW_FLUSH_FIRST)
        MUST(pcow_map_flush(map, 0, SIZE, &error));
    if (!ret)
        ret = pcow_snapshot_freeze(image, token, &failed);
    while (!ret && (ret = pcow_snapshot_finish(image, token, NULL, &failed)) == PCOW_FLUSH_FIRST)
        ret = pcow_map_flush(map, 0, SIZE, &failed);
    for (size_t at = 0; at < size && !ret; at += 2 * MIB)
        ret = pcow_snapshot_write_state(image, name, at, bytes + at,
                                        size - at < 2 * MIB ? size - at : 2 * MIB, &failed);
    if (!ret)
        ret = pcow_snapshot_set_state_size(image, name, size, &failed);
    free(bytes);
    return ret;
}

static int take(const char *name)
{
    return take_with(name, STATE);
}

static void assert_has_state(const char *name)
{
    unsigned char *bytes = malloc(STATE);

    assert_non_null(bytes);
    MUST(pcow_snapshot_read_state(image, name, 0, bytes, STATE, &error));
    for (size_t i = 0; i < STATE; i++)
        if (bytes[i] != state_byte(i))
            fail_msg("byte %zu of the state is %u", i, bytes[i]);
    free(bytes);
}

static void test_last_snapshot_in_a_full_pool(void **state)
{
    (void)state;
    begin(PCOW_ENGINE_SIGNAL);
    MUST(pcow_map_keep_spare(map, true, STATE, &error));
    wait_for(SLABS);
    assert_int_equal(stats_of().slabs_spare_wanted, SLABS);
    fill();

    /* Not by the guest, nor by a snapshot that is not the last. */
    assert_int_equal(take("no"), -ENOSPC);
    MUST(pcow_snapshot_delete(image, "no", NULL, &error));
    assert_int_equal(pcow_map_trap(map, SIZE - 4096, true), -ENOSPC);
    assert_int_equal(pcow_map_resolve(map, SIZE - 4096, 4096, true, NULL), -ENOSPC);
    assert_int_equal(stats_of().slabs_spare, SLABS);
    fill();

    pcow_map_use_spare(map, true);
    assert_int_equal(take("last"), 0);
    pcow_map_use_spare(map, false);
    MUST(pcow_snapshot_rename(image, "last", "kept", &error));
    assert_has_state("kept");
    assert_int_equal(stats_of().slabs_spare, 1);
    /* Once. */
    pcow_map_use_spare(map, true);
    assert_int_equal(take("next"), -ENOSPC);
    MUST(pcow_snapshot_delete(image, "next", NULL, &error));
    pcow_map_use_spare(map, false);

    make_room();
    wait_for(SLABS);
    end();
}

/* And is found when the file is opened by another one, who finds the pool as full. */
static void test_last_snapshot_is_found(void **state)
{
    unsigned char byte;

    (void)state;
    begin(PCOW_ENGINE_SIGNAL);
    memory[5 * 4096] = 77;
    MUST(pcow_map_keep_spare(map, true, STATE, &error));
    wait_for(SLABS);
    fill();
    pcow_map_use_spare(map, true);
    assert_int_equal(take("last"), 0);
    MUST(pcow_snapshot_rename(image, "last", "kept", &error));
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path());

    fill_pool();
    image = must_open(path(), PCOW_OPEN_WRITE);
    assert_has_state("kept");
    MUST(pcow_snapshot_revert(image, "kept", &error));
    MUST(pcow_read(image, 5 * 4096, &byte, 1, &error));
    assert_int_equal(byte, 77);
    pcow_close(image);
    must_be_clean(path());
}

/* Their records come to lie in the next page now and then. */
static void test_many_last_snapshots(void **state)
{
    (void)state;
    begin(PCOW_ENGINE_SIGNAL);
    for (unsigned i = 0; i < 10; i++) {
        char name[32];

        snprintf(name, sizeof name, "before%u", i);
        MUST(pcow_snapshot_create(image, name, &error));
    }
    MUST(pcow_map_keep_spare(map, true, 1, &error));
    for (unsigned i = 0; i < 10; i++) {
        char name[32];

        snprintf(name, sizeof name, "s%u", i);
        wait_for(2);
        usleep(5000);                  /* and the records */
        fill();
        pcow_map_use_spare(map, true);
        if (take_with(".taking", 1))
            fail_msg("snapshot %u", i);
        MUST(pcow_snapshot_rename(image, ".taking", name, &error));
        pcow_map_use_spare(map, false);
        make_room();
    }
    end();
}

/* Those that are not the last leave the records to it. */
static void test_records_stay(void **state)
{
    unsigned taken = 0;

    (void)state;
    for (unsigned before = 0; before < 10; before += 3) {
        begin(PCOW_ENGINE_SIGNAL);
        for (unsigned i = 0; i < before; i++) {
            char name[32];

            snprintf(name, sizeof name, "before%u", i);
            MUST(pcow_snapshot_create(image, name, &error));
        }
        MUST(pcow_map_keep_spare(map, true, STATE, &error));
        wait_for(SLABS);
        fill();
        for (unsigned i = 0; i < 20; i++) {
            char name[32];

            snprintf(name, sizeof name, "plain%u", i);
            if (pcow_snapshot_create(image, name, NULL))
                break;
            taken++;
        }
        pcow_map_use_spare(map, true);
        assert_int_equal(take(".taking"), 0);
        pcow_map_use_spare(map, false);
        MUST(pcow_snapshot_rename(image, ".taking", "last", &error));
        assert_has_state("last");
        make_room();
        end();
    }
    /* A record lies in a page with others, so there is room for some. */
    assert_true(taken > 0);
}

static void test_it_is_given_back(void **state)
{
    uint64_t before;

    (void)state;
    begin(PCOW_ENGINE_SIGNAL);
    usleep(20000);
    before = used();
    MUST(pcow_map_keep_spare(map, true, 8 * MIB, &error));
    wait_for(5);
    assert_true(allocated() >= before + 10 * MIB);
    MUST(pcow_map_keep_spare(map, true, STATE, &error));
    wait_for(SLABS);
    MUST(pcow_map_keep_spare(map, false, 0, &error));
    wait_for(0);
    assert_int_equal(stats_of().slabs_spare_wanted, 0);
    /* But what is prepared for the guest. */
    for (unsigned i = 0; i < 500 && used() > before + MIB; i++)
        usleep(10000);
    assert_true(used() <= before + MIB);

    /* More than the pool has, and more than anybody gets. */
    MUST(pcow_map_keep_spare(map, true, UINT64_MAX, &error));
    usleep(300000);
    assert_int_equal(stats_of().slabs_spare_wanted, 1025);
    assert_in_range(stats_of().slabs_spare, 4, 16);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path());
    image = must_open(path(), 0);
    assert_true(allocated() <= before + 256 * KIB);
    pcow_close(image);
}

/* Nothing on the medium tells of it. */
static void test_a_kill(void **state)
{
    struct pcow_check_result result;
    uint64_t before, reclaimed;
    int status;
    pid_t child;

    (void)state;
    image = must_create(path(), SIZE, 0, NULL);
    before = allocated();
    pcow_close(image);
    child = fork();
    if (child == 0) {
        image = must_open(path(), PCOW_OPEN_WRITE);
        map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
        MUST(pcow_map_keep_spare(map, true, STATE, &error));
        wait_for(SLABS);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    MUST(pcow_check(path(), 0, NULL, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
    image = must_open(path(), PCOW_OPEN_WRITE);
    assert_true(allocated() >= before + SLABS * PCOW_SLAB_SIZE);
    MUST(pcow_reclaim(image, &reclaimed, &error));
    assert_true(reclaimed >= SLABS * PCOW_SLAB_SIZE);
    pcow_close(image);
    must_be_clean(path());
}

struct writer {
    _Atomic uint64_t done;
};

static void *write_all(void *opaque)
{
    struct writer *writer = opaque;

    for (uint64_t offset = 0; offset < SIZE; offset += 4096) {
        memory[offset] = (unsigned char)(offset / 4096 % 251 + 2);
        atomic_store(&writer->done, offset / 4096 + 1);
    }
    return NULL;
}

/* A thread that would wait in a trap gets some; a vCPU, which need not, gets none. */
static void test_the_loan(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct writer writer = {0};
        struct pcow_event event = {0};
        pthread_t thread;

        begin(engine);
        MUST(pcow_snapshot_create(image, "s", &error));
        MUST(pcow_map_keep_spare(map, true, 0, &error));
        wait_for(1);
        fill();
        for (uint64_t offset = 0; offset < SIZE; offset += 64 * KIB)
            assert_int_equal(pcow_map_trap(map, offset, true), -ENOSPC);
        assert_int_equal(stats_of().slabs_spare, 1);
        assert_int_equal(pthread_create(&thread, NULL, write_all, &writer), 0);
        for (unsigned i = 0; i < 1000 && !pcow_map_next_event(map, &event); i++)
            usleep(10000);
        assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
        /* Metadata wants some of it, of ext4, too. */
        assert_in_range(atomic_load(&writer.done), 128, 520);
        assert_int_equal(stats_of().slabs_spare, 0);
        make_room();
        pthread_join(thread, NULL);
        for (uint64_t i = 0; i < SIZE; i += 4096)
            assert_int_equal(memory[i], i / 4096 % 251 + 2);
        wait_for(1);
        end();
    }
}

/* The loan comes back when there is space, though nobody stores any more. */
static void test_the_loan_comes_back(void **state)
{
    (void)state;
    if (!getenv("PCOW_TEST_LONG"))
        skip();
    begin(PCOW_ENGINE_SIGNAL);
    MUST(pcow_snapshot_create(image, "s", &error));
    MUST(pcow_map_keep_spare(map, true, 0, &error));
    wait_for(1);
    sleep(17);                         /* until the thread rests */
    fill();
    for (unsigned page = 1; stats_of().slabs_spare && page < 100; page++)
        memory[page * 4096] = 9;
    assert_int_equal(stats_of().slabs_spare, 0);
    make_room();
    wait_for(1);
    end();
}

/*
 * Whoever waits beside it takes what was lent to another one, and the loan is given back meanwhile.
 */
static void test_the_loan_is_given_back(void **state)
{
    (void)state;
    for (unsigned round = 0; round < 20; round++) {
        struct writer writer = {0};
        pthread_t thread;

        begin(PCOW_ENGINE_SIGNAL);
        MUST(pcow_snapshot_create(image, "s", &error));
        MUST(pcow_map_keep_spare(map, true, 0, &error));
        wait_for(1);
        pool_fill();
        assert_int_equal(pthread_create(&thread, NULL, write_all, &writer), 0);
        while (atomic_load(&writer.done) < round)
            ;
        MUST(pcow_map_keep_spare(map, false, 0, &error));
        usleep(10000);
        make_room();
        pthread_join(thread, NULL);
        for (uint64_t i = 0; i < SIZE; i += 4096)
            assert_int_equal(memory[i], i / 4096 % 251 + 2);
        end();
    }
}

static void test_refused(void **state)
{
    (void)state;
    pcow_close(must_create(path(), SIZE, 0, NULL));
    image = must_open(path(), 0);
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    MUST_FAIL(-EROFS, pcow_map_keep_spare(map, true, 0, &error));
    pcow_map_use_spare(map, true);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_last_snapshot_in_a_full_pool, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_last_snapshot_in_a_full_pool, ext4, pool_unmount),
        cmocka_unit_test_setup_teardown(test_last_snapshot_in_a_full_pool, ext4_of_small_blocks,
                                        pool_unmount),
        cmocka_unit_test_setup_teardown(test_last_snapshot_in_a_full_pool, xfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_last_snapshot_is_found, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_last_snapshot_is_found, ext4, pool_unmount),
        cmocka_unit_test_setup_teardown(test_many_last_snapshots, large_tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_records_stay, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_it_is_given_back, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_a_kill, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_the_loan, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_the_loan, ext4, pool_unmount),
        cmocka_unit_test_setup_teardown(test_the_loan_comes_back, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_the_loan_is_given_back, tmpfs, pool_unmount),
        cmocka_unit_test_setup_teardown(test_refused, tmpfs, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
