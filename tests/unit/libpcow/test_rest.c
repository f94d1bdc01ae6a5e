/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Slabs that are completed by the window's page table: one mapping with every page in it, and
 * nobody sees it happen. mremap() passes by here, and is counted.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define SLAB PCOW_SLAB_SIZE
#define SLABS 6u
#define THREADS 3u
#define ROUNDS 20u

void *__real_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);
void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new);

static unsigned moves;

void *__wrap_mremap(void *old, size_t old_size, size_t new_size, int flags, void *new)
{
    __atomic_fetch_add(&moves, 1, __ATOMIC_RELAXED);
    return __real_mremap(old, old_size, new_size, flags, new);
}

static int pool_setup(void **state)
{
    return pool_mount(state, "1g");
}

static const char *top(void)
{
    static char path[512];

    snprintf(path, sizeof path, "%s/top.pcow", pool_directory());
    return path;
}

static pcow_map *must_map(pcow_image *image, enum pcow_engine engine)
{
    struct pcow_map_options options = {.engine = engine,
                                       .serves_sigbus = serve_bus(),
                                       .prepared_slabs = SLABS,
                                       .full_policy = PCOW_FULL_FAIL};
    struct pcow_map_stats stats = {0};
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    for (unsigned i = 0; i < 2000 && stats.slabs_ready < SLABS; i++) {
        usleep(5000);
        pcow_map_get_stats(map, &stats);
    }
    assert_true(stats.slabs_ready >= SLABS);
    return map;
}

static unsigned mappings_in(const unsigned char *memory, uint64_t size)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long long from, to;
    char line[512];
    unsigned count = 0;

    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%llx-%llx", &from, &to) == 2 && from < (uintptr_t)memory + size
            && to > (uintptr_t)memory)
            count++;
    fclose(maps);
    return count;
}

static void must_hold(pcow_image *image, uint64_t stored, unsigned char mark)
{
    unsigned char page[4096];

    for (uint64_t offset = 0; offset < SLABS * SLAB; offset += sizeof page) {
        MUST(pcow_read(image, offset, page, sizeof page, &error));
        for (unsigned i = 0; i < sizeof page; i++)
            if (page[i] != (i == 7 && offset < stored ? mark : 0))
                fail_msg("byte %llu is %u", (unsigned long long)offset + i, page[i]);
    }
}

/*
 * A sequence ends in the middle of a slab: from a third of a slab on the rest is there, as zeros.
 */
static void check_sequence(enum pcow_engine engine)
{
    pcow_image *image = must_create(top(), SLABS * SLAB, 0, NULL);
    pcow_map *map = must_map(image, engine);
    unsigned char *memory = pcow_map_address(map);
    uint64_t end = 3 * SLAB + SLAB / 2;
    struct pcow_map_stats stats;

    for (uint64_t offset = 7; offset < end; offset += 4096)
        memory[offset] = 1;
    pcow_map_get_stats(map, &stats);
    assert_true(stats.write_traps <= 4 * 5);
    for (unsigned slab = 0; slab < 4; slab++) {
        assert_int_equal(mappings_in(memory + slab * SLAB, SLAB), 1);
        assert_int_equal(present_in(memory + slab * SLAB), PAGES_PER_SLAB);
        assert_int_equal(map->slabs[slab].pieces, 1);
    }
    must_hold(image, end, 1);

    /* A frozen slab is copied as ever, and what was frozen stays. */
    MUST(pcow_snapshot_create(image, "one", &error));
    for (uint64_t offset = 7; offset < end; offset += 4096)
        memory[offset] = 2;
    must_hold(image, end, 2);
    MUST(pcow_snapshot_revert(image, "one", &error));
    must_hold(image, end, 1);
    for (uint64_t offset = 7; offset < end; offset += 4096)
        assert_int_equal(memory[offset], 1);
    pcow_map_destroy(map);
    pcow_close(image);
    image = must_open(top(), 0);
    must_hold(image, end, 1);
    pcow_close(image);
    must_be_clean(top());
    unlink(top());
}

static void test_sequence(void **state)
{
    (void)state;
    check_sequence(PCOW_ENGINE_SIGNAL);
}

static void test_sequence_by_kvm_engine(void **state)
{
    (void)state;
    pcow_image *image = must_create(top(), SLABS * SLAB, 0, NULL);
    pcow_map *map = must_map(image, PCOW_ENGINE_KVM);
    unsigned char *memory = pcow_map_address(map);

    for (uint64_t offset = 7; offset < SLABS * SLAB; offset += 4096)
        memory[offset] = 1;
    must_hold(image, SLABS * SLAB, 1);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(top());
    unlink(top());
}

struct worker {
    unsigned char *memory;
    unsigned thread;
    bool wrong;
};

/* Each thread counts in its own word of every page, in its own order, and finds what it counted. */
static void *work(void *opaque)
{
    struct worker *worker = opaque;

    for (unsigned round = 1; round <= 3; round++)
        for (unsigned i = 0; i < SLABS * PAGES_PER_SLAB; i++) {
            unsigned page = worker->thread == 0
                                ? i
                                : i * (worker->thread == 1 ? 17u : 641u) % (SLABS * PAGES_PER_SLAB);
            uint32_t *word = (uint32_t *)(worker->memory + page * 4096 + worker->thread * 64);

            worker->wrong |= __atomic_load_n(word, __ATOMIC_RELAXED) != round - 1;
            __atomic_store_n(word, round, __ATOMIC_RELAXED);
        }
    return NULL;
}

static void test_threads_store_meanwhile(void **state)
{
    (void)state;
    for (unsigned round = 0; round < ROUNDS; round++) {
        pcow_image *image = must_create(top(), SLABS * SLAB, 0, NULL);
        pcow_map *map = must_map(image, PCOW_ENGINE_SIGNAL);
        struct worker workers[THREADS];
        pthread_t threads[THREADS];
        uint32_t words[1024];

        for (unsigned i = 0; i < THREADS; i++) {
            workers[i] = (struct worker){pcow_map_address(map), i, false};
            assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
        }
        for (unsigned i = 0; i < THREADS; i++) {
            pthread_join(threads[i], NULL);
            assert_false(workers[i].wrong);
        }
        pcow_map_destroy(map);
        for (unsigned page = 0; page < SLABS * PAGES_PER_SLAB; page++) {
            MUST(pcow_read(image, page * 4096u, words, sizeof words, &error));
            for (unsigned i = 0; i < 1024; i++)
                assert_int_equal(words[i], i % 16 == 0 && i / 16 < THREADS ? 3 : 0);
        }
        pcow_close(image);
        unlink(top());
    }
}

#define CLUSTER UINT64_C(65536)

/* Stores to every page of every second cluster, by turns with another thread or alone. */
struct filler {
    unsigned char *memory;
    sem_t *mine, *next;
    unsigned first, step;              /* clusters */
};

static void *fill(void *opaque)
{
    struct filler *filler = opaque;

    for (unsigned cluster = filler->first; cluster < SLAB / CLUSTER; cluster += filler->step) {
        sem_wait(filler->mine);
        for (uint64_t page = 0; page < CLUSTER; page += 4096)
            filler->memory[cluster * CLUSTER + page + 7] = 1;
        sem_post(filler->next);
    }
    return NULL;
}

/*
 * Returns how often page tables were moved until a slab was complete of which many pieces had been
 * stored to.
 */
static unsigned complete_in_pieces(unsigned threads)
{
    pcow_image *image = must_create(top(), SLABS * SLAB, 0, NULL);
    pcow_map *map = must_map(image, PCOW_ENGINE_SIGNAL);
    unsigned char *memory = pcow_map_address(map);
    struct filler fillers[2];
    pthread_t thread[2];
    sem_t turn[2];
    unsigned before = moves, result;

    for (unsigned i = 0; i < threads; i++)
        sem_init(&turn[i], 0, i == 0);
    for (unsigned i = 0; i < threads; i++) {
        fillers[i] =
            (struct filler){memory, &turn[i], &turn[(i + 1) % threads], 2 * i, 2 * threads};
        assert_int_equal(pthread_create(&thread[i], NULL, fill, &fillers[i]), 0);
    }
    for (unsigned i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    result = moves - before;
    assert_int_equal(mappings_in(memory, SLAB), 1);
    assert_int_equal(present_in(memory), PAGES_PER_SLAB);
    assert_int_equal(map->slabs[0].pieces, 1);
    for (uint64_t offset = 0; offset < SLAB; offset++)
        assert_int_equal(memory[offset], offset % 4096 == 7 && offset / CLUSTER % 2 == 0);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(top());
    unlink(top());
    return result;
}

/* Each mapping that goes is an interrupt for the other thread. */
static void test_several_threads_move_nothing(void **state)
{
    (void)state;
    assert_int_equal(complete_in_pieces(1), 1);
    assert_int_equal(complete_in_pieces(2), 0);
}

#define POOL_TEST(name) cmocka_unit_test_setup_teardown(name, pool_setup, pool_unmount)

int main(void)
{
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_sequence),
        POOL_TEST(test_sequence_by_kvm_engine),
        POOL_TEST(test_threads_store_meanwhile),
        POOL_TEST(test_several_threads_move_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
