/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A page is copied whose source the kernel cannot load. For a hole of a file on a full tmpfs Linux 6.1 says so, before it finds that there is no space for
 * the copy either; later ones ask in the other order. pwrite() passes by here, and is told so where it would read from a mapping.
 */
#include "support.h"

#include <string.h>
#include <unistd.h>

#define SIZE (4 * MIB)

ssize_t __real_pwrite64(int fd, const void *from, size_t length, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off64_t offset);

static bool no_load;
static int error_of_copies;
static unsigned refused;

ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off64_t offset)
{
    if (no_load && length >= 4096) {           /* from a mapping, a page or more; a copy that was read comes in pieces */
        refused++;
        errno = EFAULT;
        return -1;
    }
    if (no_load && error_of_copies) {
        errno = error_of_copies;
        return -1;
    }
    return __real_pwrite64(fd, from, length, offset);
}

static pcow_image *open_overlay(pcow_map **map, unsigned char **memory)
{
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL};
    pcow_image *image = must_create_overlay(SIZE, 0x5a);

    MUST(pcow_map_create(image, &options, map, &error));
    *memory = pcow_map_address(*map);
    refused = 0;
    return image;
}

static void test_copied_by_reading(void **state)
{
    (void)state;
    unsigned char *memory;
    pcow_map *map;
    pcow_image *image = open_overlay(&map, &memory);

    no_load = true;
    error_of_copies = 0;
    MUST(pcow_map_resolve(map, 3 * MIB, 4096, true, &error));
    no_load = false;
    assert_true(refused > 0);
    memory[3 * MIB + 5] = 1;
    for (unsigned i = 0; i < 4096; i++)
        assert_int_equal(memory[3 * MIB + i], i == 5 ? 1 : 0x5a);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* A full pool is one, and no unreadable source: who stores waits, or is told so. */
static void test_full_pool(void **state)
{
    (void)state;
    unsigned char *memory;
    pcow_map *map;
    pcow_image *image = open_overlay(&map, &memory);

    no_load = true;
    error_of_copies = ENOSPC;
    MUST_FAIL(-ENOSPC, pcow_map_resolve(map, 3 * MIB, 4096, true, &error));
    no_load = false;
    assert_true(refused > 0);
    assert_int_equal(memory[3 * MIB], 0x5a);
    memory[3 * MIB] = 2;
    assert_int_equal(memory[3 * MIB + 1], 0x5a);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_copied_by_reading, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_full_pool, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
