/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A slab that has become whole under a guest that stores to it is mapped with one entry of 2 MiB,
 * and no store is lost on the way.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support.h"

#define SLABS 8u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define PAGES (SIZE / PCOW_PAGE_SIZE)
#define WRITERS 2u
#define WORDS (PCOW_PAGE_SIZE / sizeof(uint64_t))
#define ROUNDS 10u

/* Each writer counts up words of its own in every page while others make the slabs whole. */
struct writer {
    uint64_t *memory;
    unsigned index;
    bool *stop;
    uint64_t count[PAGES];
    bool wrong;
};

static void *count_up(void *opaque)
{
    struct writer *writer = opaque;
    uint64_t seed = 7 + writer->index;

    while (!__atomic_load_n(writer->stop, __ATOMIC_RELAXED)) {
        /*
         * Not those that nobody has stored to: their slab would be hot, and be completed by the
         * thread.
         */
        uint64_t page = random_next(&seed) % PAGES;
        uint64_t *word = writer->memory + page * WORDS + 1 + writer->index;

        if (__atomic_load_n(&writer->memory[page * WORDS], __ATOMIC_RELAXED) == 0)
            continue;
        if (__atomic_load_n(word, __ATOMIC_RELAXED) != writer->count[page])
            writer->wrong = true;
        __atomic_store_n(word, ++writer->count[page], __ATOMIC_RELAXED);
    }
    return NULL;
}

/* KiB of the range that the kernel maps with entries of 2 MiB. */
static unsigned long huge_kib(const uint8_t *memory)
{
    unsigned long from = 0, to = 0, found = 0, kib;
    bool inside = false;
    FILE *file = fopen("/proc/self/smaps", "re");
    char line[512];

    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            inside = from >= (uintptr_t)memory && to <= (uintptr_t)memory + SIZE;
        else if (inside
                 && (sscanf(line, "ShmemPmdMapped: %lu", &kib) == 1
                     || sscanf(line, "FilePmdMapped: %lu", &kib) == 1))
            found += kib;
    }
    fclose(file);
    return found;
}

static void make_whole(pcow_image *image)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_SIGNAL, .full_policy = PCOW_FULL_FAIL};
    static struct writer writer[WRITERS];
    pthread_t thread[WRITERS];
    uint8_t *memory;
    pcow_map *map;
    bool stop = false;

    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
    memset(writer, 0, sizeof writer);
    for (unsigned i = 0; i < WRITERS; i++) {
        writer[i].memory = (uint64_t *)memory;
        writer[i].index = i;
        writer[i].stop = &stop;
        assert_int_equal(pthread_create(&thread[i], NULL, count_up, &writer[i]), 0);
    }
    /* In order: the windows grow, and the slab is whole before it counts as hot. */
    for (uint64_t page = 0; page < PAGES; page++)
        __atomic_store_n((uint64_t *)memory + page * WORDS, page + 1, __ATOMIC_RELAXED);
    usleep(50000);
    __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < WRITERS; i++)
        pthread_join(thread[i], NULL);
    for (uint64_t page = 0; page < PAGES; page++) {
        const uint64_t *words = (const uint64_t *)memory + page * WORDS;

        assert_int_equal(words[0], page + 1);
        for (unsigned i = 0; i < WRITERS; i++)
            assert_int_equal(words[1 + i], writer[i].count[page]);
    }
    for (unsigned i = 0; i < WRITERS; i++)
        assert_false(writer[i].wrong);
    assert_int_equal(huge_kib(memory), SIZE / KIB);
    pcow_map_destroy(map);
}

/* fill: what is done to a new image first, NULL: nothing */
static void in_rounds(void (*fill)(pcow_image *image))
{
    for (unsigned round = 0; round < ROUNDS; round++) {
        char path[600];
        pcow_image *image;

        snprintf(path, sizeof path, "%s/%u.pcow", pool_directory(), round);
        image = must_create(path, SIZE, PCOW_DEFAULT_CLUSTER_SIZE, NULL);
        if (fill)
            fill(image);
        make_whole(image);
        pcow_close(image);
        must_be_clean(path);
        unlink(path);
    }
}

static void test_absent(void **state)
{
    (void)state;
    in_rounds(NULL);
}

/* Every page was stored to once. */
static void fill_snapshot(pcow_image *image)
{
    static const uint64_t zeros[3];

    for (uint64_t page = 0; page < PAGES; page++)
        MUST(pcow_write(image, page * PCOW_PAGE_SIZE, zeros, sizeof zeros, &error));
    MUST(pcow_snapshot_create(image, "full", &error));
}

static void test_copied(void **state)
{
    (void)state;
    in_rounds(fill_snapshot);
}

static int mount_huge(void **state)
{
    return pool_mount(state, "256m,huge=always");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_absent, mount_huge, pool_unmount),
        cmocka_unit_test_setup_teardown(test_copied, mount_huge, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
