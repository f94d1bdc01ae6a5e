/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A state more than the library has, cold.h: slabs go there and come back, with every engine, and
 * hold what they held.
 */
#include "support.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cold.h"
#include "monitor/monitor.h"

#define SLABS 4u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define BASE 0x5a

static unsigned char expected[SIZE];

struct world {
    pcow_image *image;
    pcow_map *map;
    unsigned char *memory;
};

static uint64_t blocks(const char *name)
{
    struct stat st;

    assert_int_equal(stat(scratch(name), &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

/* Slabs 1 and 2 are filled by the guest, 0 and 3 are the base's. */
static struct world make_world(enum pcow_engine engine)
{
    struct world world = {.image = must_create_overlay(SIZE, BASE)};
    uint64_t seed = random_seed();

    world.map = must_map_by(world.image, engine, 0);
    world.memory = pcow_map_address(world.map);
    memset(expected, BASE, sizeof expected);
    fill_pattern(expected + PCOW_SLAB_SIZE, 2 * PCOW_SLAB_SIZE, &seed);
    memcpy(world.memory + PCOW_SLAB_SIZE, expected + PCOW_SLAB_SIZE, 2 * PCOW_SLAB_SIZE);
    MUST(cold_begin(world.map, scratch("cold"), &error));
    return world;
}

/* Has the pool the blocks of that slab? */
static bool is_in_pool(const struct world *world, uint64_t slab)
{
    struct place place = chain_find(world->image, slab, 0, PAGES_PER_SLAB);

    return !file_is_hole(&world->image->file, place.offset, PCOW_SLAB_SIZE);
}

static void put_away(const struct world *world, uint64_t slab)
{
    assert_true(is_in_pool(world, slab));
    MUST(cold_put_away(world->map, slab, &error));
    assert_int_equal(slab_state(&world->map->slabs[slab].status), SLAB_COLD);
    /* Its bytes are nowhere else: the pool has the blocks back, and nothing is mapped. */
    assert_false(is_in_pool(world, slab));
    assert_true(blocks("cold") >= PCOW_SLAB_SIZE);
    assert_false(pcow_map_is_accessible(world->map, slab * PCOW_SLAB_SIZE, false));
}

static void must_be_back(const struct world *world, uint64_t slab)
{
    assert_int_equal(slab_state(&world->map->slabs[slab].status), SLAB_MAPPED);
    assert_memory_equal(world->memory + slab * PCOW_SLAB_SIZE, expected + slab * PCOW_SLAB_SIZE,
                        PCOW_SLAB_SIZE);
}

static void end_world(struct world *world)
{
    MUST(cold_end(world->map, &error));
    assert_memory_equal(world->memory, expected, SIZE);
    pcow_map_destroy(world->map);
    assert_reads(world->image, 0, expected, SIZE);
    pcow_close(world->image);
    must_be_clean(scratch("top.pcow"));
    assert_int_equal(unlink(scratch("top.pcow")), 0);
    assert_int_equal(unlink(scratch("base.pcow")), 0);
    assert_int_equal(unlink(scratch("cold")), 0);
}

static void test_an_access_brings_it_back(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct world world = make_world(engine);
        struct pcow_map_stats before, after;

        pcow_map_get_stats(world.map, &before);
        put_away(&world, 1);
        /* A load, */
        assert_int_equal(world.memory[PCOW_SLAB_SIZE + 77], expected[PCOW_SLAB_SIZE + 77]);
        must_be_back(&world, 1);
        assert_true(blocks("cold") < PCOW_SLAB_SIZE);
        /* a store, */
        put_away(&world, 1);
        put_away(&world, 2);
        world.memory[PCOW_SLAB_SIZE + 5 * 4096] = expected[PCOW_SLAB_SIZE + 5 * 4096] = 0x11;
        must_be_back(&world, 1);
        assert_int_equal(slab_state(&world.map->slabs[2].status), SLAB_COLD);
        /* somebody who asks before a system call, */
        MUST(pcow_map_resolve(world.map, 3 * PCOW_SLAB_SIZE - 10, 10, true, &error));
        assert_true(pcow_map_is_accessible(world.map, 3 * PCOW_SLAB_SIZE - 1, true));
        must_be_back(&world, 2);
        /* and what maps it anew for a reason of its own. */
        put_away(&world, 2);
        MUST(pcow_map_restore(world.map, 2 * PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, &error));
        must_be_back(&world, 2);
        pcow_map_get_stats(world.map, &after);
        assert_int_equal(after.read_traps - before.read_traps, 1);
        assert_int_equal(after.write_traps - before.write_traps, 1);
        assert_int_equal(after.pages_copied, before.pages_copied);
        put_away(&world, 1);           /* cold_end() finds it */
        end_world(&world);
    }
}

/* What is not own as a whole is not for it. */
static void test_what_cannot_be_cold(void **state)
{
    struct world world = make_world(PCOW_ENGINE_SIGNAL);

    (void)state;
    MUST_FAIL(-EAGAIN, cold_put_away(world.map, 0, &error));
    world.memory[0] = expected[0] = 1;
    MUST_FAIL(-EAGAIN, cold_put_away(world.map, 0, &error));
    put_away(&world, 1);
    MUST_FAIL(-EAGAIN, cold_put_away(world.map, 1, &error));
    end_world(&world);
}

/* The layer that holds it is a snapshot's when it comes back. */
static void test_a_snapshot_meanwhile(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct world world = make_world(engine);
        unsigned char kept = expected[PCOW_SLAB_SIZE + 4096];

        put_away(&world, 1);
        put_away(&world, 2);
        MUST(pcow_snapshot_create(world.image, "s1", &error));
        assert_int_equal(slab_state(&world.map->slabs[1].status), SLAB_COLD);
        world.memory[PCOW_SLAB_SIZE + 4096] = expected[PCOW_SLAB_SIZE + 4096] =
            (unsigned char)(kept + 1);
        must_be_back(&world, 1);
        assert_int_equal(world.memory[2 * PCOW_SLAB_SIZE], expected[2 * PCOW_SLAB_SIZE]);
        must_be_back(&world, 2);
        /* The snapshot has what was there before. */
        MUST(cold_end(world.map, &error));
        pcow_map_destroy(world.map);
        assert_reads(world.image, 0, expected, SIZE);
        MUST(pcow_snapshot_revert(world.image, "s1", &error));
        expected[PCOW_SLAB_SIZE + 4096] = kept;
        assert_reads(world.image, 0, expected, SIZE);
        pcow_close(world.image);
        must_be_clean(scratch("top.pcow"));
        assert_int_equal(unlink(scratch("top.pcow")), 0);
        assert_int_equal(unlink(scratch("base.pcow")), 0);
    }
}

static void *load_all(void *opaque)
{
    const struct world *world = opaque;
    uint64_t seed = 5;

    for (unsigned i = 0; i < 4000; i++) {
        uint64_t offset = PCOW_SLAB_SIZE + random_next(&seed) % (2 * PCOW_SLAB_SIZE);

        if (*(volatile unsigned char *)(world->memory + offset) != expected[offset])
            return (void *)(uintptr_t)offset;
    }
    return NULL;
}

/* Somebody puts slabs away while others load from them. */
static void test_beside_loads(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        struct world world = make_world(engine);
        unsigned done = 0;
        pthread_t thread;
        void *wrong;

        assert_int_equal(pthread_create(&thread, NULL, load_all, &world), 0);
        for (unsigned i = 0; i < 200; i++)
            done += cold_put_away(world.map, 1 + i % 2, NULL) == 0;
        assert_int_equal(pthread_join(thread, &wrong), 0);
        if (wrong)
            fail_msg("engine %d: another byte at %#llx", (int)engine,
                     (unsigned long long)(uintptr_t)wrong);
        assert_true(done > 1);
        end_world(&world);
    }
}

/* A build that checks transitions stops at what would lose the bytes. */
static void test_what_would_lose_it(void **state)
{
    struct world world = make_world(PCOW_ENGINE_SIGNAL);
    int ended;
    pid_t child;

    (void)state;
#ifdef NDEBUG
    skip();
#endif
    put_away(&world, 1);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        monitor_unmap_all(world.map, NULL);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGABRT);
    end_world(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_an_access_brings_it_back, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_what_cannot_be_cold, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_a_snapshot_meanwhile, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_beside_loads, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_what_would_lose_it, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
