/* SPDX-License-Identifier: BSD-3-Clause */
/* The image monitor, the same tests for every engine: who may store where, what is copied, what many threads do at once. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "monitor/monitor.h"

static const enum pcow_engine engines[] = {PCOW_ENGINE_SIGNAL, PCOW_ENGINE_UFFD, PCOW_ENGINE_KVM};

#define FOR_EACH_ENGINE(engine)                                                                   \
    for (unsigned engine_index = 0; engine_index < 3; engine_index++)                             \
        for (enum pcow_engine engine = engines[engine_index], *once = &engine; once; once = NULL)

static pcow_map *must_map(pcow_image *image, enum pcow_engine engine)
{
    struct pcow_map_options options = {.engine = engine};
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    return map;
}

static void remove_images(void)
{
    unlink(scratch("base.pcow"));
    unlink(scratch("top.pcow"));
}

static pcow_image *make_overlay(uint64_t size, unsigned char fill)
{
    pcow_image *base = must_create(scratch("base.pcow"), size, 0, NULL);
    unsigned char *bytes = malloc(size);

    assert_non_null(bytes);
    memset(bytes, fill, size);
    MUST(pcow_write(base, 0, bytes, size, &error));
    MUST(pcow_seal(base, &error));
    pcow_close(base);
    free(bytes);
    return must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
}

static void test_absent_memory_reads_zero_and_takes_no_space(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    pcow_map *map = must_map(image, PCOW_ENGINE_SIGNAL);
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
        pcow_map *map = must_map(image, engine);
        struct pcow_map_stats stats;

        memcpy((char *)pcow_map_address(map) + 3 * MIB + 4090, "over a page border", 18);
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.engine, engine);
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
        pcow_image *image = make_overlay(4 * MIB, 0x5a), *base;
        pcow_map *map = must_map(image, engine);
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
        pcow_map *map = must_map(image, engine);
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
        /* While mapped: the frozen layer becomes part of the active one, nothing changes for the guest. */
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

/* What freeze falls back to when the kernel refuses to write-protect: nothing is mapped, and everything is still right. */
static void test_memory_without_mappings(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = make_overlay(8 * MIB, 0x5a), *view;
        pcow_map *map = must_map(image, engine);
        unsigned char *memory = pcow_map_address(map);

        memset(memory + MIB, 1, 4 * MIB);
        MUST(pcow_snapshot_create(image, "s", &error));
        MUST(monitor_unmap_all(map, &error));
        memory[2 * MIB] = 2;
        for (uint64_t offset = 0; offset < 8 * MIB; offset += 4096)
            assert_int_equal(memory[offset], offset == 2 * MIB ? 2 : offset >= MIB && offset < 5 * MIB ? 1 : 0x5a);
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
        pcow_image *image = make_overlay(4 * MIB, 0x5a);
        pcow_map *map = must_map(image, engine);
        char *memory = pcow_map_address(map);

        memset(buffer, 0x77, sizeof buffer);
        assert_int_equal(pipe(fds), 0);
        assert_int_equal(write(fds[1], buffer, sizeof buffer), sizeof buffer);
        /* What virtio-blk does: a system call stores into the guest's memory. Without the call below it gets EFAULT. */
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

static void test_vma_budget_promotes_slabs(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct pcow_map_options options = {.engine = engine, .vma_budget = 100};
        pcow_image *image = make_overlay(64 * MIB, 0x5a);
        struct pcow_map_stats stats;
        pcow_map *map;
        unsigned char *memory;
        FILE *maps;
        char line[512];
        unsigned count = 0;

        MUST(pcow_map_create(image, &options, &map, &error));
        memory = pcow_map_address(map);
        for (uint64_t offset = 0; offset < 64 * MIB; offset += 128 * KIB)
            memory[offset] = 1;
        for (uint64_t offset = 0; offset < 64 * MIB; offset += 4096)
            assert_int_equal(memory[offset], offset % (128 * KIB) ? 0x5a : 1);
        pcow_map_get_stats(map, &stats);
        assert_true(stats.slabs_promoted > 0);
        assert_true(stats.vmas <= 100);
        maps = fopen("/proc/self/maps", "re");
        assert_non_null(maps);
        while (fgets(line, sizeof line, maps)) {
            unsigned long from = 0;

            assert_int_equal(sscanf(line, "%lx-", &from), 1);
            count += from >= (uintptr_t)memory && from < (uintptr_t)memory + 64 * MIB;
        }
        fclose(maps);
        assert_true(count <= stats.vmas);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        /* Opening an image of many pieces under a budget leaves some slabs cold; they still read and write right. */
        image = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
        options.vma_budget = 40;
        MUST(pcow_map_create(image, &options, &map, &error));
        memory = pcow_map_address(map);
        for (uint64_t offset = 0; offset < 64 * MIB; offset += 4096)
            assert_int_equal(memory[offset], offset % (128 * KIB) ? 0x5a : 1);
        pcow_map_destroy(map);
        pcow_close(image);
        remove_images();
    }
}

/* ---- many threads ------------------------------------------------------------------------------------------------- */

#define THREADS 4
#define RACE_SIZE (32 * MIB)

struct racer {
    unsigned char *memory;
    unsigned number;
    pthread_barrier_t *barrier;
};

/* All threads store to every page, each to its own byte: a page copied twice would lose somebody's byte. */
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
        pcow_image *image = make_overlay(RACE_SIZE / 2, 0x5a);
        struct racer racers[THREADS];
        pthread_t threads[THREADS];
        pthread_barrier_t barrier;
        unsigned char *memory;
        pcow_map *map;

        MUST(pcow_resize(image, RACE_SIZE, false, &error));
        map = must_map(image, engine);
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
                unsigned char expected = i % 8 == 0 && i / 8 < THREADS ? (unsigned char)(i / 8 + 1) : offset < RACE_SIZE / 2 ? 0x5a : 0;

                if (memory[offset + i] != expected)
                    fail_msg("byte %llu is %02x, not %02x", (unsigned long long)(offset + i), memory[offset + i], expected);
            }
        pthread_barrier_destroy(&barrier);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        remove_images();
    }
}

/* ---- a full pool: a small tmpfs, which needs root ------------------------------------------------------------------- */

static char pool[512];

static int pool_setup(void **state)
{
    if (scratch_setup(state))
        return -1;
    snprintf(pool, sizeof pool, "%s", scratch("pool"));
    return mkdir(pool, 0700) || mount("pcow-test", pool, "tmpfs", 0, "size=4m") ? -1 : 0;
}

static int pool_teardown(void **state)
{
    umount2(pool, MNT_DETACH);
    rmdir(pool);
    return scratch_teardown(state);
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

        snprintf(path, sizeof path, "%s/top.pcow", pool);
        image = must_create(path, 8 * MIB, 0, NULL);
        map = must_map(image, engine);
        writer = (struct writer){.memory = pcow_map_address(map), .size = 8 * MIB};
        assert_int_equal(pthread_create(&thread, NULL, write_all, &writer), 0);
        for (unsigned i = 0; i < 1000 && !pcow_map_next_event(map, &event); i++)
            usleep(10000);
        assert_int_equal(event.kind, PCOW_EVENT_POOL_FULL);
        assert_int_equal(event.error, -ENOSPC);
        usleep(50000);
        stuck_at = atomic_load(&writer.done);
        assert_true(stuck_at > 0 && stuck_at < 8 * MIB);
        /* A store from the kernel's side is told instead of waiting. */
        assert_int_equal(pcow_map_resolve(map, 8 * MIB - 4096, 4096, true, NULL), -ENOSPC);
        MUST_FAIL(-ENOSPC, pcow_write(image, 7 * MIB, "x", 1, &error));
        assert_int_equal(mount("pcow-test", pool, "tmpfs", MS_REMOUNT, "size=32m"), 0);
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
        assert_int_equal(mount("pcow-test", pool, "tmpfs", MS_REMOUNT, "size=4m"), 0);
    }
}

static void fill_pool(void)
{
    static const char block[4096];
    char path[600];
    int fd;

    snprintf(path, sizeof path, "%s/filler", pool);
    fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    while (write(fd, block, sizeof block) > 0)
        ;
    close(fd);
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
 * Pages of zeros that are valid need not have blocks: in a copy, or when they were zeroed. A store to one on a full pool has to wait for
 * space as any other; mapped as it is, it would be SIGBUS, and under KVM a vCPU that tries for ever without leaving the kernel.
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

            snprintf(path, sizeof path, "%s/top.pcow", pool);
            snprintf(first, sizeof first, "%s", scratch("first.pcow"));
            image = must_create(zeroed ? path : first, 8 * MIB, 0, NULL);
            /* One page of each cluster; the others of it become valid as well. */
            map = must_map(image, engine);
            for (uint64_t offset = 0; offset < MIB; offset += 64 * KIB)
                ((unsigned char *)pcow_map_address(map))[offset] = 1;
            pcow_map_destroy(map);
            if (zeroed)
                MUST(pcow_write_zeroes(image, 64 * KIB + 4096, MIB - 128 * KIB - 4096, &error));
            pcow_close(image);
            if (!zeroed)
                copy_without_zeros(first, path);
            image = must_open(path, PCOW_OPEN_WRITE);
            map = must_map(image, engine);
            memory = pcow_map_address(map);
            fill_pool();
            for (uint64_t offset = 64 * KIB + 4096; offset < 128 * KIB; offset += 4096) {
                assert_false(pcow_map_is_accessible(map, offset, true));
                assert_int_equal(pcow_map_resolve(map, offset, 4096, true, NULL), -ENOSPC);
                assert_false(pcow_map_is_accessible(map, offset, true));
            }
            /* What has a block can be stored to. */
            MUST(pcow_map_resolve(map, 0, 4096, true, &error));
            memory[0] = 2;
            assert_int_equal(mount("pcow-test", pool, "tmpfs", MS_REMOUNT, "size=32m"), 0);
            memory[64 * KIB + 4096] = 3;
            assert_true(pcow_map_is_accessible(map, 96 * KIB, true));
            assert_false(pcow_map_is_accessible(map, 6 * MIB, true));
            /* And from then on it does not matter how full the pool is. */
            fill_pool();
            for (uint64_t offset = 64 * KIB; offset < MIB; offset += 4096)
                memory[offset + 5] = 4;
            for (uint64_t i = 64 * KIB; i < MIB; i++) {
                unsigned char expected = i % 4096 == 5 ? 4 : i == 64 * KIB + 4096 ? 3 : i % (64 * KIB) || (zeroed && i > 64 * KIB && i < MIB - 64 * KIB) ? 0 : 1;

                if (memory[i] != expected)
                    fail_msg("byte %llu is %u, not %u", (unsigned long long)i, memory[i], expected);
            }
            assert_int_equal(memory[0], 2);
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(path);
            unlink(path);
            unlink(first);
            snprintf(path, sizeof path, "%s/filler", pool);
            unlink(path);
            assert_int_equal(mount("pcow-test", pool, "tmpfs", MS_REMOUNT, "size=4m"), 0);
        }
}

static void test_snapshot_on_a_full_pool_changes_nothing(void **state)
{
    char path[600], buffer[4096] = {1};
    struct pcow_snapshot *list;
    pcow_image *image;
    size_t count;
    int ret = 0, fill;

    (void)state;
    snprintf(path, sizeof path, "%s/top.pcow", pool);
    image = must_create(path, 8 * MIB, 0, NULL);
    MUST(pcow_write(image, 0, buffer, sizeof buffer, &error));
    snprintf(path, sizeof path, "%s/filler", pool);
    fill = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fill >= 0);
    while (write(fill, buffer, sizeof buffer) > 0)
        ;
    close(fill);
    /* The first page of layer records exists, so many snapshots still fit; then the next page is needed. */
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
    unlink(path);
    MUST(pcow_snapshot_create(image, "later", &error));
    pcow_close(image);
    snprintf(path, sizeof path, "%s/top.pcow", pool);
    must_be_clean(path);
    unlink(path);
}

/* ---- signals of others ----------------------------------------------------------------------------------------------- */

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
    struct sigaction action = {.sa_sigaction = other_handler, .sa_flags = SA_SIGINFO | SA_NODEFER}, before, after;
    pcow_image *image;
    pcow_map *map;
    char *nowhere;

    (void)state;
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    image = must_create(scratch("top.pcow"), 4 * MIB, 0, NULL);
    map = must_map(image, PCOW_ENGINE_SIGNAL);
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
    struct sigaction action = {.sa_sigaction = other_handler, .sa_flags = SA_SIGINFO | SA_NODEFER}, before;
    pcow_image *image;
    volatile unsigned char *memory;
    pcow_map *map;

    (void)state;
    pcow_close(make_overlay(4 * MIB, 0x5a));
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    image = must_open(scratch("top.pcow"), 0);
    map = must_map(image, PCOW_ENGINE_SIGNAL);
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
#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_absent_memory_reads_zero_and_takes_no_space),
        TEST(test_stores_survive_reopening),
        TEST(test_base_is_never_changed),
        TEST(test_snapshot_freezes_and_revert_restores),
        TEST(test_memory_without_mappings),
        TEST(test_kernel_access_after_resolve),
        TEST(test_vma_budget_promotes_slabs),
        TEST(test_threads_on_the_same_pages),
        TEST(test_foreign_faults_reach_the_previous_handler),
        TEST(test_read_only_image_maps_read_only),
        POOL_TEST(test_full_pool_waits_and_goes_on),
        POOL_TEST(test_full_pool_and_pages_without_blocks),
        POOL_TEST(test_snapshot_on_a_full_pool_changes_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
