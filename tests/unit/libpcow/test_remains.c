/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What revert and delete have dropped: its blocks stay in the file for a while. Nobody may ever see
 * what they hold, they go back to the pool by themselves, and what still waits does not make a pool
 * full.
 */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "chain/chain.h"
#include "chain/reclaim.h"
#include "image/remains.h"
#include "operations/operations.h"

#define SLAB PCOW_SLAB_SIZE
#define DROPPED 8u                             /* slabs */

static uint64_t allocated(pcow_image *image)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    return info.allocated_size;
}

static void fill(pcow_image *image, uint64_t offset, uint64_t length, int byte)
{
    char *bytes = malloc(length);

    assert_non_null(bytes);
    memset(bytes, byte, length);
    MUST(pcow_write(image, offset, bytes, length, &error));
    free(bytes);
}

/* An empty snapshot, and DROPPED slabs of 0x55 that a revert to it has dropped. */
static pcow_image *with_remains(const char *path, uint64_t size)
{
    pcow_image *image = must_create(path, size, 64 * KIB, NULL);

    MUST(pcow_snapshot_create(image, "empty", &error));
    fill(image, 0, DROPPED * SLAB, 0x55);
    MUST(pcow_snapshot_revert(image, "empty", &error));
    assert_true(remains_are_due(image));
    assert_true(allocated(image) >= DROPPED * SLAB);
    return image;
}

/* One byte in each cluster: what comes with it must be zeros. */
static void touch_and_look(volatile unsigned char *memory, uint64_t from, uint64_t slabs)
{
    for (uint64_t offset = from; offset < from + slabs * SLAB; offset += 64 * KIB)
        memory[offset + 12345] = 1;
    for (uint64_t offset = from; offset < from + slabs * SLAB; offset++)
        if (memory[offset] != (offset % (64 * KIB) == 12345))
            fail_msg("byte %llu is %#x", (unsigned long long)offset, memory[offset]);
}

static void test_never_seen_again(void **state)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL};
    pcow_image *image = with_remains(scratch("t"), 64 * MIB);
    unsigned char *bytes = malloc(DROPPED * SLAB);
    pcow_map *map;

    (void)state;
    assert_non_null(bytes);
    /* By the tools' way: parts of pages that were never there. */
    for (uint64_t offset = 16 * SLAB; offset < (16 + DROPPED) * SLAB; offset += 64 * KIB)
        MUST(pcow_write(image, offset + 100, "x", 1, &error));
    MUST(pcow_read(image, 16 * SLAB, bytes, DROPPED * SLAB, &error));
    for (uint64_t offset = 0; offset < DROPPED * SLAB; offset++)
        if (bytes[offset] != (offset % (64 * KIB) == 100 ? 'x' : 0))
            fail_msg("byte %llu is %#x", (unsigned long long)offset, bytes[offset]);
    /* And beneath a guest that stores while the thread gives back. */
    MUST(pcow_snapshot_revert(image, "empty", &error));
    MUST(pcow_map_create(image, &options, &map, &error));
    touch_and_look(pcow_map_address(map), 0, 2 * DROPPED);
    MUST(pcow_snapshot_revert(image, "empty", &error));
    touch_and_look(pcow_map_address(map), 4 * SLAB, 2 * DROPPED);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("t"));
    free(bytes);
}

/*
 * A merge takes pages out of a slab that lives on: they are emptied when somebody asks for zeros
 * there.
 */
static void test_pages_of_a_merged_slab(void **state)
{
    pcow_image *image = must_create(scratch("t"), 8 * MIB, 0, NULL);
    unsigned char bytes[8192];
    uint64_t reclaimed, freed;

    (void)state;
    fill(image, 0, 64 * KIB, 0x55);
    MUST(pcow_snapshot_create(image, "s", &error));
    fill(image, 0, 32 * KIB, 0x66);
    MUST(pcow_snapshot_delete(image, "s", &freed, &error));
    assert_int_equal(freed, 32 * KIB);
    MUST(pcow_read(image, 28 * KIB, bytes, sizeof bytes, &error));
    assert_int_equal(bytes[0], 0x66);
    assert_int_equal(bytes[sizeof bytes - 1], 0x55);
    MUST(pcow_reclaim(image, &reclaimed, &error));
    assert_int_equal(reclaimed, 32 * KIB);
    MUST(pcow_reclaim(image, &reclaimed, &error));
    assert_int_equal(reclaimed, 0);
    MUST(pcow_read(image, 28 * KIB, bytes, sizeof bytes, &error));
    assert_int_equal(bytes[0], 0x66);
    assert_int_equal(bytes[sizeof bytes - 1], 0x55);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

static void test_the_thread_gives_back(void **state)
{
    pcow_image *image = must_create(scratch("t"), 64 * MIB, 0, NULL);
    unsigned tries = 0;
    pcow_map *map;

    (void)state;
    MUST(pcow_snapshot_create(image, "empty", &error));
    fill(image, 0, 32 * MIB, 0x55);
    MUST(pcow_map_create(image, NULL, &map, &error));
    MUST(pcow_snapshot_revert(image, "empty", &error));
    while (allocated(image) > MIB && tries++ < 2000)
        usleep(5000);
    assert_true(allocated(image) <= MIB);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

static void test_close_gives_back(void **state)
{
    struct pcow_check_result result;
    pcow_image *image;

    (void)state;
    pcow_close(with_remains(scratch("t"), 64 * MIB));
    must_be_clean(scratch("t"));
    MUST(pcow_check(scratch("t"), 0, NULL, NULL, &result, &error));
    image = must_open(scratch("t"), 0);
    assert_true(allocated(image) <= MIB);
    MUST_FAIL(-EROFS, pcow_reclaim(image, NULL, &error));
    pcow_close(image);
}

/*
 * Killed before it could: check tells, the next writer gives back whatever it came for, and nothing
 * is seen meanwhile.
 */
static void test_killed(void **state)
{
    struct pcow_check_result result;
    pcow_image *image;
    unsigned char byte = 0xff;
    int status;
    pid_t pid;

    (void)state;
    pid = fork();
    if (pid == 0) {
        with_remains(scratch("t"), 64 * MIB);
        kill(getpid(), SIGKILL);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    MUST(pcow_check(scratch("t"), 0, NULL, NULL, &result, &error));
    assert_int_equal(result.corruptions, 0);
    assert_int_equal(result.leaks, DROPPED);
    image = must_open(scratch("t"), PCOW_OPEN_WRITE);
    MUST(pcow_write(image, 40 * MIB + 5000, "x", 1, &error));
    MUST(pcow_read(image, 40 * MIB + 5001, &byte, 1, &error));
    assert_int_equal(byte, 0);
    pcow_close(image);
    must_be_clean(scratch("t"));
    image = must_open(scratch("t"), 0);
    assert_true(allocated(image) <= MIB);
    pcow_close(image);
}

static int pool_setup(void **state)
{
    return pool_mount(state, "24m");
}

/*
 * The pool is full of what was dropped, and there is no thread: stores, records and VM state find
 * the space all the same.
 */
static void test_a_full_pool_is_not_full(void **state)
{
    char path[600];
    pcow_image *image;
    unsigned char *memory;
    pcow_map *map;

    (void)state;
    snprintf(path, sizeof path, "%s/t", pool_directory());
    image = with_remains(path, 64 * MIB);
    pool_fill();
    fill(image, 20 * MIB, 7 * SLAB, 0x66);
    MUST(pcow_snapshot_revert(image, "empty", &error));
    fill(image, 0, 64 * KIB, 0x67);
    MUST(pcow_snapshot_create(image, "more", &error));
    fill(image, 0, 6 * SLAB, 0x68);
    MUST(pcow_map_create(image, &(struct pcow_map_options){.full_policy = PCOW_FULL_FAIL}, &map,
                         &error));
    memory = pcow_map_address(map);
    MUST(pcow_snapshot_revert(image, "more", &error));
    for (uint64_t offset = 30 * MIB; offset < 30 * MIB + 6 * SLAB; offset += 4096) {
        MUST(pcow_map_resolve(map, offset, 1, true, &error));
        memory[offset] = 1;
        assert_int_equal(memory[offset + 1], 0);
    }
    assert_int_equal(memory[0], 0x67);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(path);
    unlink(path);
}

/* It has stored to slabs one by one, and pages were prepared for it behind each store. */
static void kill_a_guest(const char *path)
{
    pid_t child = fork();
    pcow_image *image;
    pcow_map *map;
    int status;

    if (child == 0) {
        if (pcow_open(path, PCOW_OPEN_WRITE, NULL, &image, NULL)
            || pcow_map_create(image, NULL, &map, NULL))
            _exit(1);
        for (unsigned slab = 0; slab < DROPPED; slab++) {
            ((volatile char *)pcow_map_address(map))[slab * SLAB] = 1;
            usleep(50000);
        }
        raise(SIGKILL);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
}

/*
 * What a killed writer's thread had prepared is in slabs that are owned. The next one has stored to
 * pages that are its own only, which wakes no thread that would look for it.
 */
static void test_what_was_prepared_is_space(void **state)
{
    char path[600];
    pcow_image *image;
    unsigned char *memory;
    uint64_t reclaimed;
    pcow_map *map;

    (void)state;
    snprintf(path, sizeof path, "%s/t", pool_directory());
    for (unsigned asked = 0; asked < 2; asked++) {
        pcow_close(must_create(path, 64 * MIB, 64 * KIB, NULL));
        kill_a_guest(path);
        image = must_open(path, PCOW_OPEN_WRITE);
        assert_true(allocated(image) > 6 * MIB);
        MUST(pcow_map_create(image, &(struct pcow_map_options){.full_policy = PCOW_FULL_FAIL}, &map,
                             &error));
        memory = pcow_map_address(map);
        usleep(100000);
        memory[0] = 2;
        if (asked) {
            MUST(pcow_reclaim(image, &reclaimed, &error));
            assert_true(reclaimed > 4 * MIB);
        }
        pool_fill();
        for (unsigned slab = DROPPED + 1; slab < DROPPED + 3 && !asked; slab++)
            MUST(pcow_map_resolve(map, slab * SLAB, 1, true, &error));
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(path);
        unlink(path);
        snprintf(path, sizeof path, "%s/filler", pool_directory());
        unlink(path);
        snprintf(path, sizeof path, "%s/t", pool_directory());
    }
}

/* Slabs that a merge leaves empty are free again, so that the file does not grow for ever. */
static void test_the_file_does_not_grow(void **state)
{
    pcow_image *image = must_create(scratch("t"), 16 * MIB, 0, NULL);
    struct pcow_info info;
    char name[16];

    (void)state;
    for (unsigned round = 0; round < 8; round++) {
        for (unsigned i = 0; i < 6; i++) {
            fill(image, 0, 16 * MIB, (int)(round + i));
            snprintf(name, sizeof name, "s%u", i);
            MUST(pcow_snapshot_create(image, name, &error));
        }
        for (unsigned i = 0; i < 6; i++) {
            snprintf(name, sizeof name, "s%u", i);
            MUST(pcow_snapshot_delete(image, name, NULL, &error));
        }
        if (round % 3 == 0)
            MUST(pcow_reclaim(image, NULL, &error));
    }
    pcow_get_info(image, &info);
    assert_true(info.file_size <= 66 * SLAB);
    assert_int_equal(info.data_size, 16 * MIB);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

/*
 * Half of a copy gets into the file, then the disk fails, also when that half is to be punched out.
 */
struct failing {
    struct observer observer;
    int fd;
    unsigned writes, punches;                  /* that fail from here on */
};

static int fail_halfway(struct observer *observer, const struct observation *o)
{
    struct failing *failing = (struct failing *)observer;

    if (o->what == OBSERVED_WRITE && failing->writes > 0) {
        failing->writes--;
        assert_int_equal(pwrite(failing->fd, o->from, o->length / 2, (off_t)o->offset),
                         o->length / 2);
        return -EIO;
    }
    if (o->what == OBSERVED_PUNCH && failing->punches > 0) {
        failing->punches--;
        return -EIO;
    }
    return 0;
}

static void test_half_a_copy(void **state)
{
    struct failing failing = {
        .observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = fail_halfway}};
    unsigned char bytes[64 * KIB];
    pcow_image *image;

    (void)state;
    pcow_close(must_create(scratch("t"), 64 * MIB, 64 * KIB, NULL));
    failing.fd = open(scratch("t"), O_RDWR);
    assert_true(failing.fd >= 0);
    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &failing.observer, &image, &error));
    /* In a slab that nobody has yet, and in one that this layer has. */
    for (uint64_t offset = 0; offset <= MIB; offset += MIB) {
        memset(bytes, 0x55, sizeof bytes);
        failing.writes = failing.punches = 2;
        MUST_FAIL(-EIO, pcow_write(image, offset, bytes, sizeof bytes, &error));
        assert_true(failing.writes < 2 && failing.punches < 2);
        failing.writes = failing.punches = 0;
        MUST(pcow_write(image, offset + 100, "x", 1, &error));
        MUST(pcow_read(image, offset, bytes, sizeof bytes, &error));
        for (unsigned i = 0; i < sizeof bytes; i++)
            if (bytes[i] != (i == 100 ? 'x' : 0))
                fail_msg("byte %llu is %#x", (unsigned long long)offset + i, bytes[i]);
    }
    pcow_close(image);
    close(failing.fd);
    must_be_clean(scratch("t"));
}

/* ---- giving back beside a delete ------------------------------------------------------------- */

struct slow {
    struct observer observer;
    uint64_t slab;
    sem_t punching, go_on;
    bool met;
};

/* The first to punch in this slab is held up, as by a file system that is busy. */
static int be_slow(struct observer *observer, const struct observation *observation)
{
    struct slow *slow = (struct slow *)observer;

    if (observation->what == OBSERVED_PUNCH && slow->slab
        && observation->offset >> SLAB_BITS == slow->slab
        && !__atomic_exchange_n(&slow->met, true, __ATOMIC_SEQ_CST)) {
        sem_post(&slow->punching);
        sem_wait(&slow->go_on);
    }
    return 0;
}

static void *give_back(void *image)
{
    reclaim(image, 0);
    return NULL;
}

static void *delete_leaf(void *image)
{
    MUST(pcow_snapshot_delete(image, "leaf", NULL, &error));
    return NULL;
}

/*
 * A trap on a full pool punches out what is left in a slab, while the snapshot whose it is is
 * deleted. Nobody may get the slab before that is over: what he stored would be punched out.
 * beyond: of a guest slab that the image itself does not have.
 */
static void test_giving_back_beside_a_delete(void **state)
{
    static unsigned char data[SLAB];

    (void)state;
    memset(data, 0x77, sizeof data);
    for (unsigned beyond = 0; beyond < 2; beyond++) {
        uint64_t guest_slab = beyond ? 6 : 1;
        struct slow slow = {
            .observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = be_slow}};
        pthread_t giver, deleter;
        struct timespec soon;
        pcow_image *image;
        uint64_t slab;

        assert_int_equal(sem_init(&slow.punching, 0, 0), 0);
        assert_int_equal(sem_init(&slow.go_on, 0, 0), 0);
        unlink(scratch("t"));
        pcow_close(must_create(scratch("t"), 8 * MIB, 64 * KIB, NULL));
        MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &slow.observer, &image, &error));
        MUST(pcow_snapshot_create(image, "root", &error));
        MUST(pcow_resize(image, 16 * MIB, false, &error));
        fill(image, guest_slab * SLAB, 64 * KIB, 0x55);
        slab = slab_ref_slab(image->chain->head[guest_slab]);
        MUST(pcow_snapshot_create(image, "leaf", &error));
        MUST(pcow_snapshot_revert(image, "root", &error));
        assert_true(chain_get(image, NULL) && image->chain->guest_slabs == 4);
        /* Blocks of pages that are not valid. */
        assert_int_equal(file_write(&image->file, (slab << SLAB_BITS) + MIB, data, 64 * KIB), 0);
        remains_leave(image, slab, 0);
        slow.slab = slab;
        assert_int_equal(pthread_create(&giver, NULL, give_back, image), 0);
        assert_int_equal(sem_wait(&slow.punching), 0);
        assert_int_equal(pthread_create(&deleter, NULL, delete_leaf, image), 0);
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_sec++;
        if (pthread_timedjoin_np(deleter, NULL, &soon) == 0) {
            /* It is free, so it is what is taken now. */
            MUST(pcow_write(image, 0, data, sizeof data, &error));
            assert_int_equal(slab_ref_slab(image->chain->head[0]), slab);
            sem_post(&slow.go_on);
        } else {
            sem_post(&slow.go_on);
            pthread_join(deleter, NULL);
            MUST(pcow_write(image, 0, data, sizeof data, &error));
        }
        pthread_join(giver, NULL);
        assert_reads(image, 0, data, sizeof data);
        pcow_close(image);
        must_be_clean(scratch("t"));
        sem_destroy(&slow.punching);
        sem_destroy(&slow.go_on);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_never_seen_again),
        TEST(test_pages_of_a_merged_slab),
        TEST(test_the_thread_gives_back),
        TEST(test_close_gives_back),
        TEST(test_killed),
        cmocka_unit_test_setup_teardown(test_a_full_pool_is_not_full, pool_setup, pool_unmount),
        cmocka_unit_test_setup_teardown(test_what_was_prepared_is_space, pool_setup, pool_unmount),
        TEST(test_the_file_does_not_grow),
        TEST(test_half_a_copy),
        TEST(test_giving_back_beside_a_delete),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
