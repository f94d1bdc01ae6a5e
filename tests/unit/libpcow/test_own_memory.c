/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a mapped image takes of the host's memory beside what the guest has: 0.1 % at most of what
 * is mapped, once the guest is there.
 */
#include "support.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"

#define CLUSTER (64 * KIB)
#define SIZE (256 * MIB)
/* of 100 ms: after five seconds without a trap the thread gives back what it needs no more */
#define IDLE_TRIES 300u

static uint64_t page_table_bytes(void)
{
    FILE *file = fopen("/proc/self/status", "re");
    unsigned long long kib = 0;
    char line[256];

    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "VmPTE: %llu", &kib) == 1)
            break;
    fclose(file);
    assert_true(kib > 0);
    return kib * KIB;
}

static void store_to_each_cluster(unsigned char *memory, unsigned char value)
{
    for (uint64_t offset = 0; offset < SIZE; offset += CLUSTER)
        memory[offset + 4096 * (offset / CLUSTER % 16)] = value;
}

static void expect_stored(const unsigned char *memory, unsigned char value, unsigned char other)
{
    for (uint64_t offset = 0; offset < SIZE; offset += 4096) {
        unsigned char expected = offset / 4096 % 16 == offset / CLUSTER % 16 ? value : other;

        if (memory[offset] != expected)
            fail_msg("offset %llu is %u, not %u", (unsigned long long)offset, memory[offset],
                     expected);
    }
}

/* The same stores to a file that is mapped as it is. */
static uint64_t tables_of_raw(void)
{
    FILE *file = fopen(scratch("raw"), "we+");
    uint64_t before, taken;
    unsigned char *memory;

    assert_non_null(file);
    assert_int_equal(ftruncate(fileno(file), SIZE), 0);
    before = page_table_bytes();
    memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    store_to_each_cluster(memory, 1);
    taken = page_table_bytes() - before;
    munmap(memory, SIZE);
    fclose(file);
    unlink(scratch("raw"));
    return taken;
}

/* A sanitizer's memory has page tables as well, more than all that is looked at here. */
static bool can_measure(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    return true;
#endif
}

/*
 * Slabs are prepared and copied through mappings of their own, which take as many page tables as
 * the guest's: until nothing happens any more.
 */
static void test_page_tables_are_given_back(void **state)
{
    (void)state;
    uint64_t raw = tables_of_raw(), before, busy, idle = UINT64_MAX;
    pcow_image *image = must_create_overlay(SIZE, 0x5a);
    struct pcow_map_stats stats;
    unsigned char *memory;
    pcow_map *map;

    before = page_table_bytes();
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    memory = pcow_map_address(map);
    store_to_each_cluster(memory, 7);
    busy = page_table_bytes() - before;
    for (unsigned i = 0; i < (can_measure() ? IDLE_TRIES : 80) && idle > raw + SIZE / 2000; i++) {
        usleep(100000);
        idle = page_table_bytes() - before;
    }
    pcow_map_get_stats(map, &stats);
    print_message("page tables: raw %llu KiB, pcow %llu KiB, when idle %llu KiB; own memory %llu "
                  "KiB of %llu MiB, %u mappings\n",
                  (unsigned long long)raw / KIB, (unsigned long long)busy / KIB,
                  (unsigned long long)idle / KIB, (unsigned long long)stats.memory / KIB,
                  (unsigned long long)(SIZE / MIB), stats.vmas);
    if (can_measure()) {
        assert_true(busy > raw + SIZE / 1000);         /* else there was nothing to give back */
        assert_true(idle <= raw + SIZE / 2000);
        assert_true(idle + stats.memory <= raw + SIZE / 1000);
    }
    /* It goes on as before, through tables that are filled in anew. */
    expect_stored(memory, 7, 0x5a);
    for (uint64_t offset = 0; offset < SIZE; offset += CLUSTER)
        memory[offset + 4096 * ((offset / CLUSTER + 1) % 16)] = 0x5a;
    store_to_each_cluster(memory, 9);
    MUST(pcow_snapshot_create(image, "s", &error));
    expect_stored(memory, 9, 0x5a);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    unlink(scratch("base.pcow"));
}

static void test_what_is_counted_is_small(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 16 * 1024 * MIB, 0, NULL);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    struct pcow_map_stats stats;
    unsigned char *memory = pcow_map_address(map);

    for (uint64_t offset = 0; offset < 16 * 1024 * MIB; offset += PCOW_SLAB_SIZE * 16)
        memory[offset] = 1;
    pcow_map_get_stats(map, &stats);
    assert_true(stats.memory <= 16 * 1024 * MIB / 1000);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* Resident memory of this process that belongs to no file, in bytes. */
static uint64_t anonymous_bytes(void)
{
    FILE *file = fopen("/proc/self/status", "re");
    unsigned long long kib = 0;
    char line[256];

    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %llu", &kib) == 1)
            break;
    fclose(file);
    return kib * KIB;
}

/*
 * Locked memory is filled as far as it is accessible: tables for the largest file would be 9 GiB.
 */
static void test_locked_memory(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    uint64_t before = anonymous_bytes();
    unsigned char *memory;
    pcow_map *map;

    pcow_close(image);
    if (!can_measure() || mlockall(MCL_FUTURE))
        skip();
    image = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
    munlockall();
    assert_true(anonymous_bytes() - before < 64 * MIB);
    map = must_map_by(image, PCOW_ENGINE_SIGNAL, 0);
    memory = pcow_map_address(map);
    for (uint64_t offset = 0; offset < 64 * MIB; offset += MIB)
        memory[offset] = 1;
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* What a process with locked memory maps is filled: a hole of the file must not get its block. */
static void test_locked_memory_fills_no_hole(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL);
    struct pcow_info before, after;
    pcow_map *map;

    for (uint64_t offset = 0; offset < 64 * MIB; offset += PCOW_SLAB_SIZE)
        MUST(pcow_write(image, offset, "x", 1, &error));
    pcow_close(image);
    if (!can_measure() || mlockall(MCL_FUTURE))
        skip();
    image = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
    pcow_get_info(image, &before);
    MUST(pcow_map_create(image, &(struct pcow_map_options){.prepared_slabs = 0}, &map, &error));
    assert_int_equal(*(unsigned char *)pcow_map_address(map), 'x');
    munlockall();
    pcow_get_info(image, &after);
    assert_true(before.allocated_size < 16 * MIB);
    assert_true(after.allocated_size < before.allocated_size + 16 * MIB);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* Slabs of the file's second group (32 GiB) and further on: the tables grow with it. */
static void test_tables_grow(void **state)
{
    (void)state;
    const uint64_t size = UINT64_C(80) << 30;
    pcow_image *image = must_create(scratch("top.pcow"), size, 0, NULL);
    uint64_t seen = image->slabs_reached;

    assert_true(seen > 0 && seen < image->slab_capacity);
    /* As if all slabs of the first two groups were taken. */
    __atomic_store_n(&image->free_hint, 2 * SLABS_PER_GROUP, __ATOMIC_RELAXED);
    for (uint64_t offset = 0; offset < 4 * PCOW_SLAB_SIZE; offset += PCOW_SLAB_SIZE)
        MUST(pcow_write(image, offset, "far", 4, &error));
    assert_true(image->slabs_reached > 2 * SLABS_PER_GROUP && image->slabs_reached > seen);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    image = must_open(scratch("top.pcow"), PCOW_OPEN_WRITE);
    for (uint64_t offset = 0; offset < 4 * PCOW_SLAB_SIZE; offset += PCOW_SLAB_SIZE)
        assert_reads(image, offset, "far", 4);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_page_tables_are_given_back, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_what_is_counted_is_small, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_locked_memory, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_locked_memory_fills_no_hole, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_tables_grow, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
