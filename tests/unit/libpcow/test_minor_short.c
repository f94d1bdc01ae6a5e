/* SPDX-License-Identifier: BSD-3-Clause */
/* Engine "minor" where mappings are short: a slab stays one mapping, whatever is accessed. */
#include "scattered.h"

#include <stdio.h>

#include "monitor/engine_minor.h"

#define MANY 64u
#define LARGE (MANY * PCOW_SLAB_SIZE)
#define BUDGET (3 * MANY)
#define PAGE 4096u

static int pool_setup(void **state)
{
    return pool_mount(state, "64m");
}

/* A page of every other cluster of each slab, with a load of what is beside it or without. */
static void scatter(unsigned char *memory, unsigned char below, bool loads)
{
    for (unsigned cluster = 0; cluster < CLUSTERS; cluster += 2)
        for (unsigned slab = 0; slab < MANY; slab++) {
            unsigned char *at = memory + slab * PCOW_SLAB_SIZE + cluster * CLUSTER;

            at[7 * PAGE] = (unsigned char)(cluster + 1);
            if (loads) {
                assert_int_equal(at[6 * PAGE], below);
                assert_int_equal(at[8 * PAGE], below);
                assert_int_equal(at[7 * PAGE], cluster + 1);
            }
        }
}

static void must_be_in_budget(const pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    assert_true(stats.vmas <= stats.vma_budget);
    assert_true(count_mappings(pcow_map_address(map), LARGE) <= stats.vma_budget);
}

static uint64_t promoted(const pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats.slabs_promoted;
}

/*
 * In minor mode a slab is one mapping, however scattered: what it takes otherwise may not be there.
 */
static void test_mappings_are_short(void **state)
{
    (void)state;
    const unsigned budget = 50;

    for (unsigned frozen = 0; frozen < 2; frozen++) {
        pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
        pcow_map *map = map_with_budget(image, budget);
        unsigned char *memory;

        if (!map)
            skip();
        memory = pcow_map_address(map);
        for (unsigned slab = 0; slab < SLABS; slab++) {
            begin_slab(map, slab);
            for (unsigned cluster = 8; cluster < CLUSTERS; cluster += 2)
                memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER] = (unsigned char)(cluster + slab);
        }
        if (frozen)
            MUST(pcow_snapshot_create(image, "s", &error));
        for (unsigned slab = 0; slab < SLABS; slab++) {
            /* A load in every one; or a store to every other, if that maps a frozen one anew. */
            if (frozen && slab % 2)
                memory[slab * PCOW_SLAB_SIZE + 9 * CLUSTER] = 0;
            for (unsigned cluster = 8; cluster < CLUSTERS; cluster++)
                assert_int_equal(memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER],
                                 cluster % 2 ? 0 : cluster + slab);
            assert_true(count_mappings(memory, SIZE) <= budget);
        }
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        unlink(scratch("top.pcow"));
    }
}

static void must_be_scattered(pcow_image *image)
{
    for (unsigned slab = 0; slab < MANY; slab++)
        for (unsigned cluster = 0; cluster < CLUSTERS; cluster++)
            for (unsigned page = 6; page < 9; page++)
                must_hold(image, slab * PCOW_SLAB_SIZE + cluster * CLUSTER + page * PAGE,
                          cluster % 2 || page != 7 ? BASE : (unsigned char)(cluster + 1));
}

/*
 * Where there is no mapping left for a page, a slab is not copied whole as long as one mapping does
 * for it: nor where the guest loads, too, what is beside its pages. That is 64 KiB, and before
 * mappings are short such slabs are mapped in pieces, and then they become one.
 */
static void test_no_promotion(void **state)
{
    (void)state;
    for (unsigned loads = 0; loads < 2; loads++) {
        pcow_image *image = must_create_overlay(LARGE, BASE);
        pcow_map *map = map_with_budget(image, BUDGET);
        struct pcow_map_stats stats;

        if (!map)
            skip();
        scatter(pcow_map_address(map), BASE, loads);
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.slabs_promoted, 0);
        if (loads)
            assert_true(stats.pages_copied <= MANY * PAGES_PER_SLAB / 2);
        else
            assert_int_equal(stats.pages_copied, MANY * CLUSTERS / 2);
        must_be_in_budget(map);
        pcow_map_destroy(map);
        must_be_scattered(image);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        unlink(scratch("top.pcow"));
        unlink(scratch("base.pcow"));
    }
}

/* Small clusters: what reads on does not trap at each page. */
static void test_reads_of_small_clusters(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), LARGE, PAGE, NULL);
    pcow_map *map = map_with_budget(image, BUDGET);
    struct pcow_map_stats before, after;
    unsigned char *memory;
    unsigned kept = 0;
    struct minor *engine;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    be_sparse(map);
    scatter(memory, 0, true);
    for (unsigned slab = 0; slab < MANY; slab++)
        kept += is_minor(map, slab);
    assert_true(kept > MANY / 2);
    engine = map->of_engine;
    engine->gain = 0;
    pcow_map_get_stats(map, &before);
    for (uint64_t page = 0; page < LARGE / PAGE; page++)
        assert_int_equal(memory[page * PAGE],
                         page % 32 == 7 ? page / 16 % CLUSTERS + 1 : 0);
    pcow_map_get_stats(map, &after);
    assert_true(after.read_traps - before.read_traps <= LARGE / (64 * KIB));
    assert_int_equal(after.slabs_promoted, before.slabs_promoted);
    assert_true(engine->gain <= 0);
    must_be_in_budget(map);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* What is frozen goes on in the next file slab, for loads and for stores. */
static void test_after_snapshots(void **state)
{
    (void)state;
    pcow_image *image = must_create_overlay(LARGE, BASE);
    pcow_map *map = map_with_budget(image, BUDGET);
    unsigned char *memory;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    scatter(memory, BASE, true);
    for (unsigned round = 0; round < 3; round++) {
        char name[8];

        snprintf(name, sizeof name, "s%u", round);
        MUST(pcow_snapshot_create(image, name, &error));
        for (unsigned slab = 0; slab < MANY; slab++) {
            unsigned char *at = memory + slab * PCOW_SLAB_SIZE;

            if (slab % 2)
                at[11 * CLUSTER + round] = (unsigned char)(round + 1);
            assert_int_equal(at[9 * CLUSTER], BASE);
            assert_int_equal(at[2 * CLUSTER + 7 * PAGE], 3);
            for (unsigned before = 0; before <= round; before++)
                assert_int_equal(at[11 * CLUSTER + before], slab % 2 ? before + 1 : BASE);
        }
        must_be_in_budget(map);
    }
    assert_int_equal(promoted(map), 0);
    MUST(pcow_snapshot_delete(image, "s1", NULL, &error));
    MUST(pcow_snapshot_revert(image, "s0", &error));
    for (unsigned slab = 0; slab < MANY; slab++)
        assert_int_equal(memory[slab * PCOW_SLAB_SIZE + 11 * CLUSTER], BASE);
    pcow_map_destroy(map);
    must_be_scattered(image);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* What is not own and what is, in one instruction: neither may take the other one away. */
static void load_and_store(unsigned char *memory)
{
    alarm(30);
    for (unsigned slab = 0; slab < MANY; slab++) {
        unsigned char *to = memory + slab * PCOW_SLAB_SIZE + 6 * CLUSTER + 7 * PAGE + 1;
        const unsigned char *from = memory + slab * PCOW_SLAB_SIZE + 6 * CLUSTER + 9 * PAGE;

        __asm__ volatile("movsb" : "+S"(from), "+D"(to) : : "memory");
    }
    alarm(0);
}

/*
 * Without space a load can make nothing own, nor the slab whole: it is served all the same, and
 * waits for nothing.
 */
static void test_full_pool(void **state)
{
    (void)state;
    for (unsigned frozen = 0; frozen < 2; frozen++) {
        pcow_image *image = must_create(path_in_pool("top.pcow"), LARGE, PAGE, NULL);
        pcow_map *map = map_with_budget(image, BUDGET);
        struct pcow_map_stats stats;
        unsigned char *memory;

        if (!map)
            skip();
        memory = pcow_map_address(map);
        be_sparse(map);
        for (unsigned cluster = 0; cluster < CLUSTERS; cluster += 2)
            for (unsigned slab = 0; slab < MANY; slab++)
                memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER + 7 * PAGE] =
                    (unsigned char)(cluster + 1);
        if (frozen)
            MUST(pcow_snapshot_create(image, "s", &error));
        pool_fill();
        for (unsigned slab = 0; slab < MANY; slab++)
            for (unsigned cluster = 0; cluster < CLUSTERS; cluster++) {
                const unsigned char *at = memory + slab * PCOW_SLAB_SIZE + cluster * CLUSTER;

                assert_int_equal(at[8 * PAGE], 0);
                assert_int_equal(at[7 * PAGE], cluster % 2 ? 0 : cluster + 1);
            }
        pcow_map_get_stats(map, &stats);
        assert_int_equal(stats.pool_full_waits, 0);
        if (!frozen)
            load_and_store(memory);
        /* And where there is space again all goes on. */
        assert_int_equal(truncate(path_in_pool("filler"), 0), 0);
        for (unsigned slab = 0; slab < MANY; slab++) {
            unsigned char *at = memory + slab * PCOW_SLAB_SIZE;

            at[8 * PAGE] = 0x77;
            at[2 * CLUSTER + 7 * PAGE] = 0x78;
            assert_int_equal(at[8 * PAGE], 0x77);
            assert_int_equal(at[8 * PAGE + 1], 0);
            assert_int_equal(at[2 * CLUSTER + 7 * PAGE], 0x78);
            assert_int_equal(at[4 * CLUSTER + 7 * PAGE], 5);
        }
        pcow_map_destroy(map);
        for (unsigned slab = 0; slab < MANY; slab++)
            must_hold(image, slab * PCOW_SLAB_SIZE + 2 * CLUSTER + 7 * PAGE, 0x78);
        pcow_close(image);
        must_be_clean(path_in_pool("top.pcow"));
        unlink(path_in_pool("top.pcow"));
        unlink(path_in_pool("filler"));
    }
}

#define SCRATCH_TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        SCRATCH_TEST(test_mappings_are_short),
        SCRATCH_TEST(test_no_promotion),
        SCRATCH_TEST(test_reads_of_small_clusters),
        SCRATCH_TEST(test_after_snapshots),
        cmocka_unit_test_setup_teardown(test_full_pool, pool_setup, pool_unmount),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
