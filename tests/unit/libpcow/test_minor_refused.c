/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "minor" where the kernel refuses something, in the midst of a merge, and beside who asks.
 */
#include "scattered.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "monitor/engine_minor.h"
#include "operations/operations.h"
#include "persist/observer.h"

#define MOST_MAPPINGS 200000u          /* with a higher limit of the kernel a test is skipped */

static struct {
    struct observer observer;
    pcow_image *image;
    pcow_map *map;
    volatile unsigned char *memory;
    atomic_int refusals;               /* of the next calls that map something in the range */
    /* look for the moment at which what is own lies in two slabs, one between */
    bool merges;
    unsigned char seen;
} world;

/* In the list of slab 0, from its front: which of three are the active layer's? */
static bool is_between(void)
{
    const pcow_image *image = world.image;
    slab_ref slab = image->chain->head[0];
    const bool wanted[] = {true, false, true};
    unsigned i = 0;

    if (__atomic_load_n(&image->chain->claim[0], __ATOMIC_SEQ_CST))
        return false;
    for (; slab && i < 3; i++, slab = image->slabs[slab_ref_slab(slab)].next)
        if ((image->slabs[slab_ref_slab(slab)].layer == image_active(image)) != wanted[i])
            return false;
    return i == 3;
}

/* The guest runs while a snapshot is merged into the active layer. */
static void use_slab(void)
{
    be_sparse(world.map);
    world.memory[5 * CLUSTER + 1] = 7;         /* own, in the last one: mapped for stores */
    world.memory[20 * CLUSTER] = 8;            /* these become own in the first one */
    world.memory[24 * CLUSTER] = 8;
    world.seen = world.memory[5 * CLUSTER];
}

static int look(struct observer *observer, const struct observation *observation)
{
    const volatile unsigned char *address = observation->address;

    (void)observer;
    if (observation->what == OBSERVED_STORE && world.merges && is_between()) {
        world.merges = false;
        use_slab();
    }
    if (observation->what != OBSERVED_MAP || !world.memory || address < world.memory
        || address >= world.memory + SIZE || atomic_load(&world.refusals) == 0)
        return 0;
    atomic_fetch_sub(&world.refusals, 1);
    return -ENOMEM;
}

/* False: this kernel has no such userfaultfd. */
static bool open_world(void)
{
    struct pcow_map_options options = {.engine = PCOW_ENGINE_MINOR,
                                       .full_policy = PCOW_FULL_FAIL,
                                       .prepared_slabs = 8,
                                       .serves_sigbus = serve_bus()};
    bool minor;

    memset(&world, 0, sizeof world);
    world.observer = (struct observer){.persistence = PCOW_PERSISTENCE_VOLATILE, .look = look};
    pcow_close(must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL));
    MUST(image_open(scratch("top.pcow"), PCOW_OPEN_WRITE, NULL, &world.observer, &world.image,
                    &error));
    MUST(pcow_map_create(world.image, &options, &world.map, &error));
    minor = world.map->engine->number == PCOW_ENGINE_MINOR;
    world.memory = pcow_map_address(world.map);
    if (!minor) {
        pcow_map_destroy(world.map);
        pcow_close(world.image);
    }
    return minor;
}

static void close_world(void)
{
    pcow_map_destroy(world.map);
    pcow_close(world.image);
    must_be_clean(scratch("top.pcow"));
}

static unsigned char read_byte(const char *snapshot, uint64_t offset)
{
    pcow_image *image;
    unsigned char byte;

    MUST(pcow_open(scratch("top.pcow"), PCOW_OPEN_FORCE_SHARE, snapshot, &image, &error));
    MUST(pcow_read(image, offset, &byte, 1, &error));
    pcow_close(image);
    return byte;
}

/*
 * Neither can the slab be mapped whole, nor as it was: then nothing of it is mapped, and what was
 * stored to is protected by the next snapshot.
 */
static void test_refused(void **state)
{
    (void)state;
    for (int refusals = 1; refusals < 4; refusals++) {
        if (!open_world())
            skip();
        be_sparse(world.map);
        world.memory[5 * CLUSTER] = 1;
        atomic_store(&world.refusals, refusals);
        /* A third time, and there is nothing left but an error. */
        assert_int_equal(pcow_map_prepare(world.map, 2 * CLUSTER, 1, true, NULL),
                         refusals == 3 ? -ENOMEM : 0);
        atomic_store(&world.refusals, 0);
        world.memory[2 * CLUSTER] = 1;
        MUST(pcow_snapshot_create(world.image, "s", &error));
        world.memory[2 * CLUSTER] = 99;
        world.memory[5 * CLUSTER]++;
        close_world();
        assert_int_equal(read_byte("s", 2 * CLUSTER), 1);
        assert_int_equal(read_byte("s", 5 * CLUSTER), 1);
        assert_int_equal(read_byte(NULL, 2 * CLUSTER), 99);
        assert_int_equal(read_byte(NULL, 5 * CLUSTER), 2);
        unlink(scratch("top.pcow"));
    }
}

static void test_own_in_two_slabs(void **state)
{
    (void)state;
    if (!open_world())
        skip();
    be_sparse(world.map);
    world.memory[5 * CLUSTER] = 55;
    MUST(pcow_snapshot_create(world.image, "s1", &error));
    /*
     * lies between the two in the file, so that they are not given over one right after the other
     */
    world.memory[3 * PCOW_SLAB_SIZE] = 1;
    world.memory[7 * CLUSTER] = 66;
    MUST(pcow_snapshot_create(world.image, "s2", &error));
    world.memory[9 * CLUSTER] = 77;
    MUST(pcow_snapshot_delete(world.image, "s1", NULL, &error));
    world.merges = true;
    MUST(pcow_snapshot_delete(world.image, "s2", NULL, &error));
    assert_false(world.merges);                /* the moment was there */
    assert_int_equal(world.seen, 55);
    assert_int_equal(world.memory[5 * CLUSTER], 55);
    assert_int_equal(world.memory[5 * CLUSTER + 1], 7);
    assert_int_equal(world.memory[7 * CLUSTER], 66);
    assert_int_equal(world.memory[9 * CLUSTER], 77);
    assert_int_equal(world.memory[20 * CLUSTER], 8);
    close_world();
    assert_int_equal(read_byte(NULL, 5 * CLUSTER + 1), 7);
    assert_int_equal(read_byte(NULL, 24 * CLUSTER), 8);
}

/*
 * Nothing can even be unmapped: the mapping stays registered, and what traps there is a trap and no
 * media error.
 */
static void test_no_mapping_is_left(void **state)
{
    void **taken = calloc(MOST_MAPPINGS, sizeof *taken);
    unsigned count = 0;
    int ret;

    (void)state;
    if (!taken || !open_world()) {
        free(taken);
        skip();
    }
    begin_slab(world.map, 0);
    for (; count < MOST_MAPPINGS; count++) {
        taken[count] = mmap(NULL, PCOW_PAGE_SIZE, count % 2 ? PROT_READ : PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (taken[count] == MAP_FAILED)
            break;
    }
    ret = pcow_map_resolve(world.map, 20 * CLUSTER, PCOW_PAGE_SIZE, false, NULL);
    for (unsigned i = 0; i < count; i++)
        munmap(taken[i], PCOW_PAGE_SIZE);
    free(taken);
    if (count < MOST_MAPPINGS)
        assert_int_equal(ret, -ENOMEM);
    assert_int_equal(world.memory[20 * CLUSTER], 0);
    world.memory[21 * CLUSTER] = 3;
    assert_int_equal(world.memory[5 * CLUSTER + 3], 1);
    close_world();
    assert_int_equal(read_byte(NULL, 21 * CLUSTER), 3);
    assert_int_equal(read_byte(NULL, 2 * CLUSTER + 3), 1);
}

/*
 * What nobody has asked for may come into minor mode later, so nobody may be told that the kernel
 * can access it (vhost would believe it for long).
 */
static void test_beside_what_was_asked_for(void **state)
{
    int file;

    (void)state;
    if (!open_world())
        skip();
    file = open(scratch("file"), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    be_sparse(world.map);
    world.memory[PCOW_SLAB_SIZE - 4096] = 1;
    world.memory[PCOW_SLAB_SIZE] = 1;
    MUST(pcow_map_resolve(world.map, PCOW_SLAB_SIZE - 4096, 1, true, &error));
    assert_true(pcow_map_is_accessible(world.map, PCOW_SLAB_SIZE - 4096, true));
    assert_false(pcow_map_is_accessible(world.map, PCOW_SLAB_SIZE, true));
    assert_false(pcow_map_is_accessible(world.map, PCOW_SLAB_SIZE, false));
    begin_slab(world.map, 1);
    assert_int_equal(pwrite(file, (unsigned char *)world.memory + PCOW_SLAB_SIZE + 4096, 1, 0), -1);
    assert_int_equal(errno, EFAULT);
    assert_int_equal(pwrite(file, (unsigned char *)world.memory + PCOW_SLAB_SIZE - 4096, 1, 0), 1);
    close(file);
    close_world();
}

/* Asked for is for good, also where a snapshot unmaps everything (copy-on-read). */
static void test_asked_for_and_unmapped(void **state)
{
    (void)state;
    if (!open_world())
        skip();
    MUST(pcow_map_resolve(world.map, 0, 1, true, &error));
    MUST(monitor_unmap_all(world.map, &error));
    MUST(monitor_map_all(world.map, &error));
    be_sparse(world.map);
    world.memory[5 * CLUSTER] = 1;
    world.memory[2 * CLUSTER] = 1;
    world.memory[9 * CLUSTER] = 1;
    assert_false(is_minor(world.map, 0));
    begin_slab(world.map, 1);
    close_world();
}

/* A program that has its stores served tells of some that would not have trapped. */
static void test_traps_that_are_none(void **state)
{
    const struct minor *minor;
    uint64_t asked;
    int gain;

    (void)state;
    if (!open_world())
        skip();
    begin_slab(world.map, 0);
    minor = world.map->of_engine;
    gain = minor->gain;
    asked = world.map->asked;
    for (unsigned i = 0; i < 100; i++)
        assert_int_equal(pcow_map_trap(world.map, 5 * CLUSTER, true), 0);
    assert_true(minor->gain <= gain + 1);
    assert_int_equal(world.map->asked, asked + 100);
    for (unsigned i = 0; i < 100; i++)
        MUST(pcow_map_prepare(world.map, 5 * CLUSTER, 1, true, &error));
    assert_int_equal(world.map->asked, asked + 100);
    assert_true(is_minor(world.map, 0));
    assert_int_equal(pcow_map_trap(world.map, SIZE, true), -EFAULT);
    close_world();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_refused, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_own_in_two_slabs, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_no_mapping_is_left, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_beside_what_was_asked_for, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_asked_for_and_unmapped, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_traps_that_are_none, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
