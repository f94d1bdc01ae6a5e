/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "minor": slabs into which pages are let. Everything else about it is what the other
 * engines do as well, and tested with them.
 */
#include "scattered.h"

#include <fcntl.h>

#include "chain/reclaim.h"
#include "image/prepare.h"

static void test_stores_cut_no_mapping(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_minor(image);
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
    assert_int_equal(after.pages_zeroed - before.pages_zeroed, 4 * 16);
    assert_int_equal(after.vmas, before.vmas);
    /*
     * Of a cluster to which the guest comes back the rest is let in with one trap; what it was
     * loaded from is own and zeros.
     */
    before = after;
    memory[PCOW_SLAB_SIZE + 7 * CLUSTER + 5 * 4096] = 1;
    for (unsigned page = 0; page < 16; page++)
        assert_int_equal(memory[PCOW_SLAB_SIZE + 7 * CLUSTER + page * 4096], page == 5);
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.write_traps - before.write_traps, 1);
    assert_int_equal(after.read_traps, before.read_traps);
    assert_int_equal(after.pages_zeroed, before.pages_zeroed);
    assert_true(is_minor(map, 1));
    pcow_map_destroy(map);
    for (unsigned cluster = 0; cluster < CLUSTERS; cluster++)
        must_hold(image, PCOW_SLAB_SIZE + cluster * CLUSTER + 9,
                  cluster >= 7 && cluster < 15 && cluster % 2 ? (unsigned char)cluster : 0);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* A page of a base at a time, into one mapping. */
static void test_copies_cut_no_mapping(void **state)
{
    (void)state;
    pcow_image *image = must_create_overlay(SIZE, BASE);
    pcow_map *map = map_minor(image);
    struct pcow_map_stats before, after;
    unsigned char *memory;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 2);
    pcow_map_get_stats(map, &before);
    for (unsigned cluster = 6; cluster < CLUSTERS; cluster += 2)
        memory[2 * PCOW_SLAB_SIZE + cluster * CLUSTER + 4096] = (unsigned char)cluster;
    pcow_map_get_stats(map, &after);
    assert_int_equal(count_mappings(memory + 2 * PCOW_SLAB_SIZE, PCOW_SLAB_SIZE), 1);
    assert_int_equal(after.write_traps - before.write_traps, (CLUSTERS - 6) / 2);
    assert_int_equal(after.pages_copied - before.pages_copied, (CLUSTERS - 6) / 2);
    /*
     * What was copied is there, with no trap; what was not is the base's, and then the slab is
     * pieces.
     */
    assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 8 * CLUSTER + 4096], 8);
    assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 8 * CLUSTER + 4097], BASE);
    assert_true(is_minor(map, 2));
    assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 8 * CLUSTER], BASE);
    assert_false(is_minor(map, 2));
    before = after;
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.read_traps - before.read_traps, 1);
    assert_int_equal(after.pages_copied, before.pages_copied);
    for (uint64_t page = 0; page < PAGES_PER_SLAB; page++) {
        unsigned cluster = (unsigned)(page / 16);
        bool stored = cluster >= 6 && cluster % 2 == 0 && page % 16 == 1;

        assert_int_equal(memory[2 * PCOW_SLAB_SIZE + page * 4096], stored ? cluster : BASE);
    }
    pcow_map_destroy(map);
    for (unsigned cluster = 6; cluster < CLUSTERS; cluster++)
        must_hold(image, 2 * PCOW_SLAB_SIZE + cluster * CLUSTER + 4096,
                  cluster % 2 ? BASE : (unsigned char)cluster);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* A load brings nothing into the image, and the slab is as under signal until the next snapshot. */
static void test_loads_allocate_nothing(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_minor(image);
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
    assert_false(is_minor(map, 0));
    be_sparse(map);
    memory[20 * CLUSTER] = 1;
    memory[22 * CLUSTER] = 1;
    assert_false(is_minor(map, 0));
    MUST(pcow_snapshot_create(image, "s", &error));
    begin_slab(map, 0);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/*
 * Where each slab is loaded from after all, few are put into minor mode; where they are stored to
 * again, all are.
 */
static void test_gain(void **state)
{
    (void)state;
    enum { MANY = 64 };
    pcow_image *image = must_create_overlay(MANY * PCOW_SLAB_SIZE, BASE);
    pcow_map *map = map_minor(image);
    volatile unsigned char *memory;
    unsigned put = 0;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    for (unsigned round = 0; round < 2; round++)
        for (unsigned slab = 0; slab < MANY; slab++) {
            if (slab == 0 && round == 1)
                MUST(pcow_snapshot_create(image, "s", &error));
            memory[slab * PCOW_SLAB_SIZE] = memory[slab * PCOW_SLAB_SIZE + 2 * CLUSTER] = 1;
            put += is_minor(map, slab);
            assert_int_equal(memory[slab * PCOW_SLAB_SIZE + 4 * CLUSTER], BASE);
            assert_false(is_minor(map, slab));
        }
    assert_in_range(put, 1, 30);
    MUST(pcow_snapshot_create(image, "t", &error));
    put = 0;
    for (unsigned slab = 0; slab < MANY; slab++) {
        for (unsigned cluster = 0; cluster < CLUSTERS; cluster += 2)
            memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER] = 2;
        put += is_minor(map, slab);
    }
    assert_true(put > MANY / 2);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static void test_system_calls_that_ask(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_minor(image);
    unsigned char *memory, byte = 1;
    int file;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    file = open(scratch("file"), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    assert_true(file >= 0);
    begin_slab(map, 0);
    /* As pcow.h says: what is absent, and what is own and was not let in yet. */
    assert_int_equal(pwrite(file, memory + CLUSTER, 1, 0), -1);
    assert_int_equal(errno, EFAULT);
    assert_int_equal(pwrite(file, memory + 2 * CLUSTER + 4096, 1, 0), -1);
    assert_int_equal(errno, EFAULT);
    assert_false(pcow_map_is_accessible(map, 5 * CLUSTER, true));
    assert_true(is_minor(map, 0));
    MUST(pcow_map_resolve(map, CLUSTER, 4096, false, &error));
    assert_false(is_minor(map, 0));
    assert_true(pcow_map_is_accessible(map, 5 * CLUSTER, true));
    assert_int_equal(pwrite(file, memory + CLUSTER, 1, 0), 1);
    assert_int_equal(pread(file, &byte, 1, 0), 1);
    assert_int_equal(byte, 0);
    assert_int_equal(pwrite(file, memory + 5 * CLUSTER + 4096, 1, 0), 1);
    /* A page that is own already, for a store. */
    begin_slab(map, 1);
    MUST(pcow_map_resolve(map, PCOW_SLAB_SIZE + 5 * CLUSTER, 2 * 4096, true, &error));
    assert_false(is_minor(map, 1));
    byte = 77;
    assert_int_equal(pwrite(file, &byte, 1, 0), 1);
    assert_int_equal(pread(file, memory + PCOW_SLAB_SIZE + 5 * CLUSTER + 4096, 1, 0), 1);
    assert_int_equal(memory[PCOW_SLAB_SIZE + 5 * CLUSTER + 4096], 77);
    /* And for good: a buffer that was prepared for loads may be in use over a snapshot. */
    MUST(pcow_snapshot_create(image, "s", &error));
    be_sparse(map);
    for (unsigned cluster = 1; cluster < 8; cluster += 2)
        memory[cluster * CLUSTER] = 1;
    assert_false(is_minor(map, 0));
    assert_int_equal(pwrite(file, memory + 20 * CLUSTER, 1, 0), 1);
    close(file);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* Served by somebody else's handler, which does not wait. */
static void test_served_by_the_program(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_minor(image);
    siginfo_t info = {.si_signo = SIGBUS, .si_code = BUS_ADRERR};
    unsigned char *memory;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 0);
    info.si_addr = memory + 9 * CLUSTER;
    assert_true(pcow_is_trap(&info));
    assert_int_equal(pcow_map_trap(map, 9 * CLUSTER + 5, true), 0);
    memory[9 * CLUSTER + 5] = 1;
    assert_true(is_minor(map, 0));
    info.si_addr = memory + PCOW_SLAB_SIZE;
    assert_false(pcow_is_trap(&info));
    info.si_addr = &info;
    assert_false(pcow_is_trap(&info));
    assert_int_equal(pcow_map_trap(map, SIZE, true), -EFAULT);
    pcow_map_destroy(map);
    must_hold(image, 9 * CLUSTER + 5, 1);
    pcow_close(image);
}

/*
 * Frozen in minor mode: what was stored stays in the snapshot, what is stored later does not come
 * into it.
 */
static void test_snapshots(void **state)
{
    (void)state;
    for (unsigned on_base = 0; on_base < 2; on_base++) {
        pcow_image *image = on_base ? must_create_overlay(SIZE, BASE)
                                    : must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
        pcow_map *map = map_minor(image);
        const unsigned char below = on_base ? BASE : 0;
        volatile unsigned char *memory;

        if (!map)
            skip();
        memory = pcow_map_address(map);
        for (unsigned slab = 0; slab < 4; slab++)
            begin_slab(map, slab);
        MUST(pcow_snapshot_create(image, "one", &error));
        assert_int_equal(slab_state(&map->slabs[0].status), SLAB_MINOR_FROZEN);
        memory[5 * CLUSTER + 3] = 2;                       /* own before */
        memory[PCOW_SLAB_SIZE + 9 * CLUSTER] = 2;          /* not own before */
        assert_int_equal(memory[2 * PCOW_SLAB_SIZE + 9 * CLUSTER], below);
        assert_int_equal(memory[3 * PCOW_SLAB_SIZE + 5 * CLUSTER + 3], 1);
        assert_int_equal(memory[2 * CLUSTER + 3], 1);
        /* A system call that has asked: of a frozen one. */
        MUST(pcow_map_resolve(map, 3 * PCOW_SLAB_SIZE, PCOW_SLAB_SIZE, false, &error));
        assert_false(slab_is_kept(&map->slabs[3].status));
        begin_slab(map, 6);
        MUST(pcow_snapshot_revert(image, "one", &error));
        for (unsigned slab = 0; slab < SLABS; slab++)
            for (unsigned cluster = 0; cluster < CLUSTERS; cluster++)
                for (unsigned byte = 0; byte < 4; byte++)
                    assert_int_equal(
                        memory[slab * PCOW_SLAB_SIZE + cluster * CLUSTER + byte],
                        slab < 4 && byte == 3 && (cluster == 5 || cluster == 2) ? 1 : below);
        /*
         * And again on top of it: what a merge gives to the layer lies in another slab of the file.
         */
        begin_slab(map, 7);
        memory[7 * PCOW_SLAB_SIZE + 11 * CLUSTER] = 9;
        MUST(pcow_snapshot_create(image, "two", &error));
        begin_slab(map, 7);
        MUST(pcow_snapshot_delete(image, "two", NULL, &error));
        memory[7 * PCOW_SLAB_SIZE + 12 * CLUSTER] = 9;
        memory[7 * PCOW_SLAB_SIZE + 11 * CLUSTER + 1] = 8;
        assert_int_equal(memory[7 * PCOW_SLAB_SIZE + 11 * CLUSTER], 9);
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        image = must_open(scratch("top.pcow"), 0);
        for (unsigned cluster = 0; cluster < CLUSTERS; cluster++) {
            must_hold(image, 7 * PCOW_SLAB_SIZE + cluster * CLUSTER,
                      cluster == 11 || cluster == 12 ? 9 : below);
            must_hold(image, 7 * PCOW_SLAB_SIZE + cluster * CLUSTER + 1, cluster == 11 ? 8 : below);
        }
        pcow_close(image);
        unlink(scratch("top.pcow"));
        unlink(scratch("base.pcow"));
    }
}

/*
 * A slab that has become whole is a mapping like any other, and one with its neighbours where it
 * can be.
 */
static void test_whole(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = map_minor(image);
    struct pcow_map_stats before, after;
    unsigned char *memory;

    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 0);
    for (unsigned i = 0; i < CLUSTERS; i++)
        memory[i * 7 % CLUSTERS * CLUSTER + 9] = 1;
    assert_false(is_minor(map, 0));
    pcow_map_get_stats(map, &before);
    for (unsigned page = 0; page < PAGES_PER_SLAB; page++)
        memory[page * 4096 + 10] = 1;
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.write_traps, before.write_traps);
    /* A system call need not ask for what is no such slab. */
    assert_int_equal(kernel_store(memory + 77, 3), 1);
    pcow_map_destroy(map);
    must_hold(image, 77, 3);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* Space that is given back while a slab is in minor mode is no page of it. */
static void test_prepared_pages_go(void **state)
{
    (void)state;
    struct pcow_map_options options = {
        .engine = PCOW_ENGINE_MINOR, .serves_sigbus = serve_bus(), .prepared_slabs = 1};
    pcow_image *image = must_create_overlay(SIZE, BASE);
    unsigned char *memory;
    uint64_t in_file;
    unsigned prepared;
    pcow_map *map;

    MUST(pcow_map_create(image, &options, &map, &error));
    if (map->engine->number != PCOW_ENGINE_MINOR)
        skip();
    memory = pcow_map_address(map);
    for (unsigned i = 0; i < 1000 && prepared_count(image) == 0; i++)
        usleep(5000);
    begin_slab(map, 3);
    in_file = slab_ref_slab(image->chain->head[3]);
    prepared = page_set_count(&image->prepared[in_file]);
    assert_true(reclaim_for_space(image));
    assert_true(page_set_count(&image->prepared[in_file]) < prepared);
    assert_true(is_minor(map, 3));
    memory[3 * PCOW_SLAB_SIZE + 9 * CLUSTER] = 1;
    memory[3 * PCOW_SLAB_SIZE + 11 * CLUSTER + 5 * 4096] = 1;
    assert_int_equal(memory[3 * PCOW_SLAB_SIZE + 9 * CLUSTER + 1], BASE);
    assert_true(is_minor(map, 3));
    assert_int_equal(memory[3 * PCOW_SLAB_SIZE + 13 * CLUSTER], BASE);
    pcow_map_destroy(map);
    must_hold(image, 3 * PCOW_SLAB_SIZE + 9 * CLUSTER, 1);
    must_hold(image, 3 * PCOW_SLAB_SIZE + 11 * CLUSTER + 5 * 4096, 1);
    must_hold(image, 3 * PCOW_SLAB_SIZE + 11 * CLUSTER + 4 * 4096, BASE);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

static void test_what_has_none(void **state)
{
    (void)state;
    struct pcow_map_options options = {.engine = PCOW_ENGINE_MINOR, .serves_sigbus = serve_bus()};
    struct pcow_map_stats stats;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map;

    pcow_close(image);
    image = must_open(scratch("top.pcow"), 0);
    MUST(pcow_map_create(image, &options, &map, &error));
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.engine, PCOW_ENGINE_SIGNAL);
    assert_null(map->of_engine);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_stores_cut_no_mapping, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_copies_cut_no_mapping, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_loads_allocate_nothing, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_gain, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_system_calls_that_ask, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_served_by_the_program, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_snapshots, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_whole, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_prepared_pages_go, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_what_has_none, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
