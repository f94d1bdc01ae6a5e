/* SPDX-License-Identifier: BSD-3-Clause */
/* Engine "guard": absent memory behind guard regions. Everything else about it is what the other engines do as well, and tested with them. */
#include "guarded.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25               /* Linux 6.1 */
#endif

static void test_stores_cut_no_mapping(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_guarded(image);
    unsigned char *memory;
    struct pcow_map_stats before, after;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 1);
    assert_int_equal(count_mappings(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE), 1);
    pcow_map_get_stats(map, &before);
    /* Every other cluster: nothing would merge. */
    for (unsigned cluster = 7; cluster < 15; cluster += 2) {
        memory[PCOW_SLAB_SIZE + cluster * CLUSTER + 9] = (unsigned char)cluster;
        assert_int_equal(count_mappings(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE), 1);
    }
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.write_traps - before.write_traps, 4);
    assert_int_equal(after.vmas, before.vmas);
    /* What is there is mapped: no trap. */
    memory[PCOW_SLAB_SIZE + 7 * CLUSTER + 4096] = 1;
    assert_int_equal(memory[PCOW_SLAB_SIZE + 5 * CLUSTER + 3], 1);
    pcow_map_get_stats(map, &before);
    assert_int_equal(after.write_traps, before.write_traps);
    assert_int_equal(after.read_traps, before.read_traps);
    assert_true(is_guarded(map, 1));
    pcow_map_destroy(map);
    for (unsigned cluster = 0; cluster < CLUSTERS; cluster++) {
        unsigned char byte, expected = cluster >= 7 && cluster < 15 && cluster % 2 ? (unsigned char)cluster : 0;

        MUST(pcow_read(image, PCOW_SLAB_SIZE + cluster * CLUSTER + 9, &byte, 1, &error));
        assert_int_equal(byte, expected);
    }
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* A load brings nothing into the image, and takes the guards away for good. */
static void test_loads_allocate_nothing(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_guarded(image);
    volatile unsigned char *memory;
    struct pcow_map_stats before, after;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 0);
    pcow_map_get_stats(map, &before);
    for (uint64_t offset = 0; offset < PCOW_SLAB_SIZE; offset += 4096)
        assert_int_equal(memory[offset], 0);
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.read_traps - before.read_traps, 1);
    assert_int_equal(after.pages_zeroed, before.pages_zeroed);
    assert_false(is_guarded(map, 0));
    be_sparse(map);
    memory[20 * CLUSTER] = 1;
    memory[22 * CLUSTER] = 1;
    usleep(50000);
    assert_false(is_guarded(map, 0));
    pcow_map_destroy(map);
    pcow_close(image);
}

static void test_system_calls_that_ask(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_guarded(image);
    unsigned char *memory, byte = 1;
    int file;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    file = open(scratch("file"), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    assert_true(file >= 0);
    begin_slab(map, 0);
    /* As pcow.h says. */
    assert_int_equal(pwrite(file, memory + CLUSTER, 1, 0), -1);
    assert_int_equal(errno, EFAULT);
    assert_int_equal(pwrite(file, memory + 5 * CLUSTER + 3, 1, 0), 1);
    assert_true(is_guarded(map, 0));
    MUST(pcow_map_resolve(map, CLUSTER, 4096, false, &error));
    assert_int_equal(pwrite(file, memory + CLUSTER, 1, 0), 1);
    assert_int_equal(pread(file, &byte, 1, 0), 1);
    assert_int_equal(byte, 0);
    /* A store is prepared behind guards. */
    begin_slab(map, 1);
    MUST(pcow_map_resolve(map, PCOW_SLAB_SIZE + 9 * CLUSTER, 4096, true, &error));
    byte = 77;
    assert_int_equal(pwrite(file, &byte, 1, 0), 1);
    assert_int_equal(pread(file, memory + PCOW_SLAB_SIZE + 9 * CLUSTER, 1, 0), 1);
    assert_int_equal(memory[PCOW_SLAB_SIZE + 9 * CLUSTER], 77);
    assert_true(is_guarded(map, 1));
    close(file);
    pcow_map_destroy(map);
    pcow_close(image);
}

/* Frozen with its guards: what was stored stays in the snapshot, what is stored later does not come into it. */
static void test_snapshots(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_guarded(image);
    volatile unsigned char *memory;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    for (unsigned slab = 0; slab < 4; slab++)
        begin_slab(map, slab);
    MUST(pcow_snapshot_create(image, "one", &error));
    assert_int_equal(map->slabs[0].guarded, GUARDED_FROZEN);
    memory[5 * CLUSTER + 3] = 2;                       /* own before */
    memory[PCOW_SLAB_SIZE + 9 * CLUSTER] = 2;          /* absent before */
    assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 9 * CLUSTER], 0);
    assert_int_equal(memory[3 * PCOW_SLAB_SIZE + 5 * CLUSTER + 3], 1);
    assert_int_equal(memory[2 * CLUSTER + 3], 1);
    /* A system call that has asked: of a frozen one, and of one with new guards. */
    MUST(pcow_map_resolve(map, 3 * PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, false, &error));
    assert_int_equal(map->slabs[3].guarded, GUARDED_NOT);
    begin_slab(map, 6);
    MUST(pcow_snapshot_revert(image, "one", &error));
    for (unsigned slab = 0; slab < SLABS; slab++)
        for (unsigned cluster = 0; cluster < CLUSTERS; cluster++)
            for (unsigned byte = 0; byte < 4; byte++)
                assert_int_equal(memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER + byte],
                                 slab < 4 && byte == 3 && (cluster == 5 || cluster == 2));
    /* And again on top of it. */
    begin_slab(map, 7);
    memory[7 * PCOW_SLAB_SIZE + 11 * CLUSTER] = 9;
    MUST(pcow_snapshot_create(image, "two", &error));
    MUST(pcow_snapshot_delete(image, "two", NULL, &error));
    memory[7 * PCOW_SLAB_SIZE + 12 * CLUSTER] = 9;
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
    image = must_open(scratch("top.pcow"), 0);
    for (unsigned cluster = 0; cluster < CLUSTERS; cluster++) {
        unsigned char byte;

        MUST(pcow_read(image, 7 * PCOW_SLAB_SIZE + cluster * CLUSTER, &byte, 1, &error));
        assert_int_equal(byte, cluster == 11 || cluster == 12 ? 9 : 0);
    }
    pcow_close(image);
}

/* Behind guards a slab is one mapping, however scattered: what it takes without them may not be there. */
static void test_guards_go_where_mappings_are_short(void **state)
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
                assert_int_equal(memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER], cluster % 2 ? 0 : cluster + slab);
            assert_true(count_mappings(memory, SIZE) <= budget);
        }
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        unlink(scratch("top.pcow"));
    }
}

/* Guards are all that keeps these stores from pages that are not own. */
static void test_the_kernel_keeps_guards(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_guarded(image);
    struct pcow_map_stats before, after;
    unsigned char *memory;
    uint64_t in_file;
    void *other;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    /* With neighbours, of which it could become a part. */
    for (unsigned slab = 0; slab < 3; slab++)
        begin_slab(map, slab);
    in_file = chain_find(image, 1, 5 * CLUSTER / PCOW_PAGE_SIZE, 1).offset / PCOW_SLAB_SIZE * PCOW_SLAB_SIZE;
    assert_int_equal(fallocate(image->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(in_file + 10 * CLUSTER), CLUSTER), 0);
    other = mmap(NULL, PCOW_SLAB_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, image->file.fd, (off_t)in_file);
    assert_ptr_not_equal(other, MAP_FAILED);
    /* A huge page for the file slab, if there is one to be had. */
    if (madvise(other, PCOW_SLAB_SIZE, MADV_COLLAPSE))
        print_message("no huge page: %s\n", strerror(errno));
    madvise(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, MADV_COLLAPSE);
    munmap(other, PCOW_SLAB_SIZE);
    madvise(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, MADV_COLD);
    assert_int_equal(mprotect(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, PROT_READ), 0);
    assert_int_equal(mprotect(memory + PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, PROT_READ | PROT_WRITE), 0);
    pcow_map_get_stats(map, &before);
    for (unsigned cluster = 7; cluster < 17; cluster++)
        memory[PCOW_SLAB_SIZE + cluster * CLUSTER] = 1;
    pcow_map_get_stats(map, &after);
    assert_true(after.write_traps - before.write_traps >= 4);  /* a sequence brings in more and more at a time */
    for (unsigned cluster = 7; cluster < 17; cluster++) {
        unsigned char byte;

        MUST(pcow_read(image, PCOW_SLAB_SIZE + cluster * CLUSTER, &byte, 1, &error));
        assert_int_equal(byte, 1);
    }
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* In a build with a sanitizer mlockall() says that it has, and does nothing. */
static bool can_lock(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    return true;
#endif
}

/* What is locked into memory from now on has none. */
static void test_locked_memory(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_guarded(image);
    unsigned char *memory;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    if (!can_lock() || mlockall(MCL_FUTURE)) {
        pcow_map_destroy(map);
        pcow_close(image);
        skip();
    }
    be_sparse(map);
    for (unsigned cluster = 0; cluster < 5; cluster++)
        memory[cluster * 3 * CLUSTER] = 1;
    for (unsigned i = 0; i < TRIES && !__atomic_load_n(&map->guards_refused, __ATOMIC_RELAXED); i++)
        usleep(5000);
    munlockall();
    assert_true(map->guards_refused);
    assert_false(is_guarded(map, 0));
    memory[PCOW_SLAB_SIZE] = memory[PCOW_SLAB_SIZE + 4 * CLUSTER] = memory[PCOW_SLAB_SIZE + 8 * CLUSTER] = 1;
    for (unsigned cluster = 0; cluster < CLUSTERS; cluster++)
        assert_int_equal(memory[cluster * CLUSTER], cluster % 3 == 0 && cluster < 15);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static void test_what_has_no_guards(void **state)
{
    (void)state;
    struct pcow_map_options options = {.engine = PCOW_ENGINE_GUARD};
    struct pcow_map_stats stats;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map;

    pcow_close(image);
    image = must_open(scratch("top.pcow"), 0);
    MUST(pcow_map_create(image, &options, &map, &error));
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.engine, PCOW_ENGINE_SIGNAL);
    assert_null(map->guard_area);
    pcow_map_destroy(map);
    pcow_close(image);
    /* A slab of which a base has something. */
    unlink(scratch("top.pcow"));
    image = must_create_overlay(SIZE, 0x5a);
    map = map_guarded(image);
    if (!map)
        skip();
    be_sparse(map);
    for (unsigned cluster = 0; cluster < 6; cluster++)
        ((unsigned char *)pcow_map_address(map))[cluster * 2 * CLUSTER] = 1;
    usleep(50000);
    assert_false(is_guarded(map, 0));
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_stores_cut_no_mapping, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_loads_allocate_nothing, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_system_calls_that_ask, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_snapshots, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_guards_go_where_mappings_are_short, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_the_kernel_keeps_guards, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_locked_memory, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_what_has_no_guards, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
