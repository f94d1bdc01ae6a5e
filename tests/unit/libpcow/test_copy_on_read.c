/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The copy-on-read switch: what a load finds in an older layer is brought into the active one, slab
 * by slab, and nothing else is.
 */
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "image/image.h"
#include "operations/operations.h"

static uint64_t own_size(pcow_image *image)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    return info.data_size;
}

/*
 * A base with a page in each of the first two slabs and nothing in the third, and an image on it.
 */
static pcow_image *make(bool on)
{
    struct pcow_create_options options = {.base = scratch("base"), .copy_on_read = on};
    pcow_image *image = must_create(scratch("base"), 6 * MIB, 0, NULL);

    MUST(pcow_write(image, 5 * 4096, "first", 6, &error));
    MUST(pcow_write(image, 2 * MIB, "second", 7, &error));
    pcow_close(image);
    MUST(pcow_create(scratch("top"), &options, &error));
    return must_open(scratch("top"), PCOW_OPEN_WRITE);
}

static void test_loads_copy_once(void **state)
{
    pcow_image *image = make(true);
    struct pcow_map_stats stats;
    const volatile char *memory;
    pcow_map *map;

    (void)state;
    MUST(pcow_map_create(image, NULL, &map, &error));
    memory = pcow_map_address(map);
    assert_int_equal(own_size(image), 0);
    assert_int_equal(memory[5 * 4096], 'f');
    assert_int_equal(own_size(image), 2 * MIB);
    assert_int_equal(memory[2 * MIB - 1], 0);
    assert_int_equal(memory[4 * MIB], 0);               /* nobody holds it: no copy, no space */
    assert_int_equal(own_size(image), 2 * MIB);
    MUST(pcow_map_resolve(map, 2 * MIB, 4096, false, &error));
    assert_int_equal(own_size(image), 4 * MIB);
    assert_int_equal(memory[2 * MIB], 's');
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.read_traps + stats.write_traps <= 2, 1);
    /* A snapshot makes old layers of new ones. */
    MUST(pcow_snapshot_create(image, "s", &error));
    assert_int_equal(own_size(image), 0);
    assert_int_equal(memory[2 * MIB], 's');
    assert_int_equal(own_size(image), 2 * MIB);
    MUST(pcow_snapshot_revert(image, "s", &error));
    assert_int_equal(memory[5 * 4096], 'f');
    assert_int_equal(own_size(image), 2 * MIB);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top"));
}

static void test_switched_off(void **state)
{
    pcow_image *image = make(false);
    const volatile char *memory;
    struct pcow_info info;
    pcow_map *map;

    (void)state;
    MUST(pcow_map_create(image, NULL, &map, &error));
    memory = pcow_map_address(map);
    assert_int_equal(memory[5 * 4096], 'f');
    assert_int_equal(memory[2 * MIB], 's');
    assert_int_equal(own_size(image), 0);
    pcow_map_destroy(map);
    MUST(pcow_set_copy_on_read(image, true, &error));
    pcow_close(image);
    image = must_open(scratch("top"), 0);
    pcow_get_info(image, &info);
    assert_true(info.copy_on_read);
    MUST_FAIL(-EROFS, pcow_set_copy_on_read(image, false, &error));
    /* Nothing can be copied into an image that is open for reading. */
    MUST(pcow_map_create(image, NULL, &map, &error));
    assert_int_equal(*((const volatile char *)pcow_map_address(map) + 5 * 4096), 'f');
    assert_int_equal(own_size(image), 0);
    pcow_map_destroy(map);
    pcow_close(image);
}

static int pool_is_full(struct observer *observer, const struct observation *observation)
{
    (void)observer;
    return observation->what == OBSERVED_ALLOCATE || observation->what == OBSERVED_WRITE ? -ENOSPC
                                                                                         : 0;
}

/* What only saves time later must not stop a guest now. */
static void test_a_load_on_a_full_pool(void **state)
{
    struct observer observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = pool_is_full};
    const volatile char *memory;
    pcow_image *image = make(true);
    pcow_map *map;

    (void)state;
    pcow_close(image);
    MUST(image_open(scratch("top"), PCOW_OPEN_WRITE, NULL, &observer, &image, &error));
    MUST(pcow_map_create(image, NULL, &map, &error));
    memory = pcow_map_address(map);
    assert_int_equal(memory[5 * 4096], 'f');
    assert_int_equal(own_size(image), 0);
    MUST_FAIL(-ENOSPC, pcow_map_resolve(map, 5 * 4096, 4096, true, &error));
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top"));
}

#define SLABS 64u

struct reader {
    pcow_map *map;
    int file;
    unsigned refused;
};

/*
 * Has system calls load from each slab as soon as it is said to be there: they get no signal, so it
 * must be.
 */
static void *load_by_system_calls(void *opaque)
{
    struct reader *reader = opaque;
    const char *memory = pcow_map_address(reader->map);

    for (uint64_t v = 0; v < SLABS; v++) {
        while (!pcow_map_is_accessible(reader->map, v * PCOW_SLAB_SIZE, false))
            ;
        reader->refused += pwrite(reader->file, memory + v * PCOW_SLAB_SIZE, 64, 0) != 64;
    }
    return NULL;
}

static void test_a_slab_is_there_when_it_is_said_to_be(void **state)
{
    struct pcow_create_options options = {.base = scratch("base"), .copy_on_read = true};
    pcow_image *image = must_create(scratch("base"), SLABS * PCOW_SLAB_SIZE, 0, NULL);
    struct reader reader = {.file = memfd_create("loaded", MFD_CLOEXEC)};
    pthread_t thread;

    (void)state;
    for (uint64_t v = 0; v < SLABS; v++)
        MUST(pcow_write(image, v * PCOW_SLAB_SIZE, "there", 6, &error));
    pcow_close(image);
    MUST(pcow_create(scratch("top"), &options, &error));
    image = must_open(scratch("top"), PCOW_OPEN_WRITE);
    MUST(pcow_map_create(image, NULL, &reader.map, &error));
    assert_int_equal(pthread_create(&thread, NULL, load_by_system_calls, &reader), 0);
    for (uint64_t v = 0; v < SLABS; v++) {
        MUST(pcow_map_resolve(reader.map, v * PCOW_SLAB_SIZE, 4096, false, &error));
        /* the other thread waits for the next one */
        usleep(100);
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(reader.refused, 0);
    pcow_map_destroy(reader.map);
    pcow_close(image);
    close(reader.file);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_loads_copy_once),
        TEST(test_switched_off),
        TEST(test_a_load_on_a_full_pool),
        TEST(test_a_slab_is_there_when_it_is_said_to_be),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
