/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The kernel's limit of mappings: what the monitor takes of it, and what happens where there are
 * none left. And what it takes of memory.
 */
#include "support.h"

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

static void test_vma_budget_promotes_slabs(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct pcow_map_options options = {.engine = engine,
                                           .serves_sigbus =
                                               engine == PCOW_ENGINE_MINOR && serve_bus(),
                                           .vma_budget = 100};
        pcow_image *image = must_create_overlay(64 * MIB, 0x5a);
        struct pcow_map_stats stats;
        pcow_map *map;
        unsigned char *memory;

        MUST(pcow_map_create(image, &options, &map, &error));
        memory = pcow_map_address(map);
        for (uint64_t offset = 0; offset < 64 * MIB; offset += 128 * KIB)
            memory[offset] = 1;
        for (uint64_t offset = 0; offset < 64 * MIB; offset += 4096)
            assert_int_equal(memory[offset], offset % (128 * KIB) ? 0x5a : 1);
        pcow_map_get_stats(map, &stats);
        /* but where one mapping does for a slab, whatever of it is own */
        assert_int_equal(stats.slabs_promoted > 0, stats.engine != PCOW_ENGINE_MINOR);
        assert_true(stats.vmas <= 100);
        assert_true(count_mappings(memory, 64 * MIB) <= stats.vmas);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        /*
         * Opening an image of many pieces under a budget leaves some slabs cold; they still read
         * and write right.
         */
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

/*
 * One mapping more than the process may have, so that every mmap() fails; NULL: they are too many.
 */
static void *use_up_mappings(size_t *size)
{
    const size_t unit = 4 * 4096;      /* two pages of each protection */
    unsigned char *hog;
    unsigned count = 0;
    FILE *file = fopen("/proc/sys/vm/max_map_count", "r");
    size_t at;

    assert_true(file && fscanf(file, "%u", &count) == 1);
    fclose(file);
    if (count > 1000000)
        return NULL;
    *size = (count + UINT64_C(16)) * unit;
    hog = mmap(NULL, *size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(hog, MAP_FAILED);
    for (at = 0; at < *size && mprotect(hog + at, 2 * 4096, PROT_READ) == 0; at += unit)
        ;
    /* Between two of them, which the kernel splits without asking how many there are. */
    for (at = 4096; at < *size; at += unit)
        if (mmap(hog + at, 2 * 4096, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
            == MAP_FAILED)
            return hog;
    munmap(hog, *size);
    return NULL;
}

static bool was_withdrawn(pcow_map *map)
{
    struct pcow_event event;
    bool found = false;

    while (pcow_map_next_event(map, &event))
        found |= event.kind == PCOW_EVENT_WITHDRAWN;
    return found;
}

/*
 * At the limit of mappings a slab can neither be mapped anew nor unmapped: what was mapped for
 * stores still is. A snapshot must not be changed by stores to it, nor may a delete give blocks
 * back that are still mapped.
 */
static void test_out_of_mappings(void **state)
{
    (void)state;
#ifdef __SANITIZE_THREAD__
    skip();                            /* it takes mappings itself */
#endif
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create(scratch("top.pcow"), 8 * MIB, 64 * KIB, NULL), *view;
        unsigned char *bytes = malloc(8 * MIB);
        unsigned char *memory;
        pcow_map *map;
        unsigned budget;
        size_t size;
        void *hog;
        int mapped, deleted;

        assert_non_null(bytes);
        memset(bytes, 1, 8 * MIB);
        MUST(pcow_write(image, 0, bytes, 8 * MIB, &error));
        MUST(pcow_snapshot_create(image, "old", &error));
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        budget = map->vma_budget;
        memory[3 * MIB] = 2;
        assert_false(was_withdrawn(map));
        hog = use_up_mappings(&size);
        if (!hog)
            skip();
        map->vma_budget = 1;           /* a trap takes the whole slab */
        mapped = pcow_map_resolve(map, 3 * MIB + 100 * 4096, 4096, true, NULL);
        deleted = pcow_snapshot_delete(image, "old", NULL, NULL);
        munmap(hog, size);
        map->vma_budget = budget;
        assert_int_equal(mapped, -ENOMEM);
        assert_int_equal(deleted, -ENOMEM);
        assert_true(was_withdrawn(map));
        MUST(pcow_reclaim(image, NULL, &error));
        for (uint64_t offset = 0; offset < 8 * MIB; offset += 4096)
            assert_int_equal(memory[offset], offset == 3 * MIB ? 2 : 1);
        pcow_map_destroy(map);
        pcow_close(image);

        /* The next writer finishes the delete. */
        image = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
        MUST(pcow_snapshot_create(image, "new", &error));
        map = must_map_by(image, engine, 0);
        memory = pcow_map_address(map);
        memory[3 * MIB] = 3;
        hog = use_up_mappings(&size);
        map->vma_budget = 1;
        mapped = pcow_map_resolve(map, 3 * MIB + 100 * 4096, 4096, true, NULL);
        munmap(hog, size);
        map->vma_budget = budget;
        assert_int_equal(mapped, -ENOMEM);
        MUST(pcow_snapshot_create(image, "s", &error));
        memory[3 * MIB] = 4;
        memory[3 * MIB + 200 * 4096] = 4;
        MUST(pcow_open(scratch("top.pcow"), 0, "s", &view, &error));
        bytes[3 * MIB] = 3;
        assert_reads(view, 0, bytes, 8 * MIB);
        pcow_close(view);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        remove_images();
        free(bytes);
    }
}

/*
 * The estimate of the traps must not grow from one snapshot to the next: it would have every store
 * copy a slab in the end.
 */
static void test_snapshots_do_not_use_the_budget_up(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        pcow_image *image = must_create_overlay(64 * MIB, 0x5a);
        pcow_map *map = must_map_by(image, engine, 0);
        unsigned char *memory = pcow_map_address(map);
        struct pcow_map_stats stats;
        char name[16];

        for (unsigned round = 0; round < 40; round++) {
            for (uint64_t offset = MIB; offset < 64 * MIB; offset += 2 * MIB)
                memory[offset] = (unsigned char)round;
            snprintf(name, sizeof name, "s%u", round);
            MUST(pcow_snapshot_create(image, name, &error));
        }
        pcow_map_get_stats(map, &stats);
        assert_true(count_mappings(memory, 64 * MIB) <= stats.vmas + 1);
        assert_true(stats.vmas <= 32 * 4);
        pcow_map_destroy(map);
        pcow_close(image);
        remove_images();
    }
}

/* The kernel's limit is that of the process: two images share what is left of it. */
static void test_maps_share_the_budget(void **state)
{
    pcow_image *image[2];
    pcow_map *map[2];
    unsigned used = 0;

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        image[i] = must_create(scratch(i ? "base.pcow" : "top.pcow"), 64 * MIB, 4096, NULL);
        map[i] = must_map_by(image[i], PCOW_ENGINE_SIGNAL, 0);
        map[i]->vma_budget = 200;
    }
    for (uint64_t offset = 0; offset < 64 * MIB; offset += 128 * KIB)
        for (unsigned i = 0; i < 2; i++)
            ((unsigned char *)pcow_map_address(map[i]))[offset] = 1;
    /* Not while a thread has cut a mapping that it is about to make one with its neighbours. */
    for (unsigned i = 0; i < 2; i++)
        turnstile_hold(map[i]);
    for (unsigned i = 0; i < 2; i++)
        used += count_mappings(pcow_map_address(map[i]), 64 * MIB);
    for (unsigned i = 0; i < 2; i++)
        turnstile_release(map[i]);
    assert_in_range(used, 64, 200 + 2 * 4);    /* a trap that has begun adds a few */
    for (unsigned i = 0; i < 2; i++) {
        pcow_map_destroy(map[i]);
        pcow_close(image[i]);
    }
    /* All of it is free again. */
    image[0] = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
    map[0] = must_map_by(image[0], PCOW_ENGINE_SIGNAL, 0);
    assert_int_equal(vmas_used(map[0]), map[0]->vmas);
    pcow_map_destroy(map[0]);
    pcow_close(image[0]);
    remove_images();
}

/* What a snapshot needs for page tables that it has moved is kept for the next one, and told. */
static void test_memory_of_snapshots_is_counted(void **state)
{
    pcow_image *image = must_create(scratch("top.pcow"), 8 * MIB, 0, NULL);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    struct pcow_map_stats without, with;
    struct moved *moved;
    size_t room;

    (void)state;
    memset(pcow_map_address(map), 1, 8 * MIB);
    MUST(pcow_snapshot_create(image, "s", &error));
    turnstile_hold(map);                   /* it makes the file grow */
    moved = map->retired.moved;
    room = map->retired.room;
    map->retired.room = 0;
    pcow_map_get_stats(map, &without);
    map->retired.room = room;
    pcow_map_get_stats(map, &with);
    turnstile_release(map);
    if (image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE)
        assert_non_null(moved);
    assert_int_equal(with.memory - without.memory, moved ? 4 * sizeof *moved : 0);
    pcow_map_destroy(map);
    pcow_close(image);
    remove_images();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_vma_budget_promotes_slabs),
        TEST(test_out_of_mappings),
        TEST(test_snapshots_do_not_use_the_budget_up),
        TEST(test_maps_share_the_budget),
        TEST(test_memory_of_snapshots_is_counted),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
