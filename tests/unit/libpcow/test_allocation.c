/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A trap comes in the middle of anything, also of malloc(), whose lock it would then wait for
 * without end: neither it nor a thread that it may wait for allocates. The program is linked so
 * that the library's calls pass by here.
 */
#include "support.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SLABS 24u
#define SLAB PCOW_SLAB_SIZE
#define PREPARED 8u

static atomic_bool trapping;           /* the guest stores, and nobody does anything else */
static atomic_uint seen;

static void look(void)
{
    if (trapping)
        seen++;
}

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void __real_free(void *memory);
void __wrap_free(void *memory);

void *__wrap_malloc(size_t size)
{
    look();
    return __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    look();
    return __real_calloc(count, size);
}

void *__wrap_realloc(void *memory, size_t size)
{
    look();
    return __real_realloc(memory, size);
}

void __wrap_free(void *memory)
{
    look();
    __real_free(memory);
}

/* What it looks for would be found. */
static void test_calls_pass_by_here(void **state)
{
    void *volatile memory;

    (void)state;
    seen = 0;
    trapping = true;
    memory = malloc(1);
    memory = realloc(memory, 2);
    free(memory);
    memory = calloc(1, 1);
    free(memory);
    trapping = false;
    assert_int_equal(seen, 5);
}

static struct pcow_map_stats stats_of(pcow_map *map)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    return stats;
}

/* Single pages, others of the same clusters, a sequence, all of a slab; then a snapshot's pages. */
static void store(volatile unsigned char *memory)
{
    for (unsigned v = 0; v < SLABS; v++)
        memory[v * SLAB + 5 * PCOW_PAGE_SIZE] = 1;
    for (unsigned v = 0; v < SLABS; v++)
        memory[v * SLAB + 7 * PCOW_PAGE_SIZE] = 2;
    for (unsigned v = 0; v < SLABS; v += 2)
        for (unsigned page = 0; page < 128; page++)
            memory[v * SLAB + page * PCOW_PAGE_SIZE] = 3;
    for (unsigned v = 0; v < SLABS; v += 3)
        for (unsigned page = 0; page < SLAB / PCOW_PAGE_SIZE; page++)
            memory[v * SLAB + page * PCOW_PAGE_SIZE] = 4;
}

static void check_engine(enum pcow_engine engine, unsigned prepared, unsigned budget)
{
    struct pcow_map_options options = {.engine = engine,
                                       .serves_sigbus = serve_bus(),
                                       .prepared_slabs = prepared,
                                       .vma_budget = budget};
    pcow_image *base = must_create(scratch("base.pcow"), SLABS * SLAB, 0, NULL), *image;
    volatile unsigned char *memory;
    pcow_map *map;

    for (unsigned v = 0; v < SLABS / 2; v++)
        for (unsigned page = 0; page < SLAB / PCOW_PAGE_SIZE; page += 16)
            MUST(pcow_write(base, v * SLAB + page * PCOW_PAGE_SIZE, "base", 4, &error));
    MUST(pcow_seal(base, &error));
    pcow_close(base);
    image = must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow"));
    MUST(pcow_map_create(image, &options, &map, &error));
    for (unsigned i = 0; i < 2000 && stats_of(map).slabs_ready < prepared; i++)
        usleep(5000);
    assert_true(stats_of(map).slabs_ready >= prepared);
    memory = pcow_map_address(map);
    for (unsigned round = 0; round < 2; round++) {
        uint64_t before = stats_of(map).write_traps;

        seen = 0;
        trapping = true;
        store(memory);
        trapping = false;
        assert_int_equal(seen, 0);
        assert_true(stats_of(map).write_traps - before >= SLABS);
        MUST(pcow_snapshot_create(image, round ? "second" : "first", &error));
    }
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

static void test_nobody_allocates_in_a_trap(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine) {
        check_engine(engine, PREPARED, 0);
        check_engine(engine, 0, 0);
        check_engine(engine, PREPARED, SLABS * 3);         /* slabs have to be made whole */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls_pass_by_here),
        cmocka_unit_test_setup_teardown(test_nobody_allocates_in_a_trap, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
