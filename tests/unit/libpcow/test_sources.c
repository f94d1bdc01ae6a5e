/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A page is copied whose source the kernel cannot load. For a hole of a file on a full tmpfs Linux
 * 6.1 says so, before it finds that there is no space for the copy either; later ones ask in the
 * other order. pwrite() passes by here, and is told so where it would read from a mapping.
 */
#include "support.h"

#include <string.h>
#include <unistd.h>

#include "operations/operations.h"
#include "persist/observer.h"

#define SIZE (4 * MIB)

ssize_t __real_pwrite64(int fd, const void *from, size_t length, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off64_t offset);

static bool no_load;
static int error_of_copies;
static unsigned refused;

ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off64_t offset)
{
    /* from a mapping, a page or more; a copy that was read comes in pieces */
    if (no_load && length >= 4096) {
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

static void assert_counted(const pcow_map *map, uint64_t copied, uint64_t zeroed)
{
    struct pcow_map_stats stats;

    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.pages_copied, copied);
    assert_int_equal(stats.pages_zeroed, zeroed);
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
    assert_counted(map, 0, 0);
    assert_int_equal(memory[3 * MIB], 0x5a);
    memory[3 * MIB] = 2;
    assert_int_equal(memory[3 * MIB + 1], 0x5a);
    assert_counted(map, 1, 0);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/* Commits, or writes of more than a page. */
struct refusing {
    struct observer observer;
    _Atomic enum observed what;
    _Atomic uint64_t shortest;         /* that is refused, bytes */
};

static int look(struct observer *observer, const struct observation *seen)
{
    const struct refusing *refusing = (const struct refusing *)observer;

    return seen->what == refusing->what && seen->length >= refusing->shortest ? -ENOSPC : 0;
}

#define HELD 8u                        /* pages of the first cluster that the base holds */

/* On the first page of them the guest has been. */
static pcow_image *open_refusing(struct refusing *refusing, pcow_map **map)
{
    static unsigned char bytes[HELD * 4096];
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL};
    pcow_image *image = must_create(scratch("base.pcow"), SIZE, 0, NULL);

    memset(bytes, 0x5a, sizeof bytes);
    MUST(pcow_write(image, 0, bytes, sizeof bytes, &error));
    pcow_close(image);
    pcow_close(must_create(scratch("top.pcow"), 0, 0, scratch("base.pcow")));
    *refusing = (struct refusing){
        .observer = {.persistence = PCOW_PERSISTENCE_PAGE_CACHE, .look = look},
        .shortest = UINT64_MAX};
    MUST(image_open(scratch("top.pcow"), PCOW_OPEN_WRITE, NULL, &refusing->observer, &image,
                    &error));
    MUST(pcow_map_create(image, &options, map, &error));
    MUST(pcow_map_resolve(*map, 0, 4096, true, &error));
    assert_counted(*map, 1, 0);
    return image;
}

static void close_refusing(pcow_image *image, pcow_map *map)
{
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

/*
 * The rest of the cluster is copied and filled, but cannot be made durable: so it does not become
 * own.
 */
static void test_not_published_not_counted(void **state)
{
    static struct refusing refusing;
    pcow_map *map;
    pcow_image *image = open_refusing(&refusing, &map);

    (void)state;
    refusing.what = OBSERVED_SYNC;
    refusing.shortest = 0;
    assert_int_equal(pcow_map_resolve(map, 4096, 4096, true, NULL), -ENOSPC);
    assert_counted(map, 1, 0);
    refusing.shortest = UINT64_MAX;
    MUST(pcow_map_resolve(map, 4096, 4096, true, &error));
    assert_counted(map, HELD, 16 - HELD);
    close_refusing(image, map);
}

/* There is space for one page only. */
static void test_second_try_counted_once(void **state)
{
    static struct refusing refusing;
    pcow_map *map;
    pcow_image *image = open_refusing(&refusing, &map);

    (void)state;
    refusing.what = OBSERVED_WRITE;
    refusing.shortest = 4097;
    MUST(pcow_map_resolve(map, 4096, 4096, true, &error));
    assert_counted(map, 2, 0);
    close_refusing(image, map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_copied_by_reading, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_full_pool, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_not_published_not_counted, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_second_try_counted_once, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
