/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "minor": a slab that is being unmapped, or that the kernel refused to unmap, and who looks
 * at it at that moment. The program is linked so that its calls of mmap() pass by here.
 */
#include "scattered.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static unsigned char *volatile memory;
static pcow_map *map;

enum mode { WORKS, REFUSED, REFUSED_FOR_FILES, FIRST_LOADS };

static volatile enum mode mode;

static pthread_t thread;
static void *(*volatile beside)(void *opaque);

static void begin_beside(void)
{
    mode = WORKS;
    assert_int_equal(pthread_create(&thread, NULL, beside, NULL), 0);
    /* It may get as far as it does without a claim. */
    usleep(200000);
}

void *__real_mmap64(void *address, size_t length, int protection, int flags, int fd,
                    off64_t offset);
void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd,
                    off64_t offset);

void *__wrap_mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    unsigned char *at = address;
    void *mapped;

    if (!memory || at < memory || at >= memory + PCOW_SLAB_SIZE || mode == WORKS)
        return __real_mmap64(address, length, protection, flags, fd, offset);
    if (mode == REFUSED || (mode == REFUSED_FOR_FILES && fd >= 0)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (mode == FIRST_LOADS)
        begin_beside();
    mapped = __real_mmap64(address, length, protection, flags, fd, offset);
    if (mode == REFUSED_FOR_FILES && protection == PROT_NONE)
        begin_beside();
    return mapped;
}

static pcow_image *begin(void)
{
    pcow_image *image = must_create_overlay(SIZE, BASE);

    map = map_minor(image);
    if (!map)
        skip();
    memory = pcow_map_address(map);
    begin_slab(map, 0);
    return image;
}

static void end(pcow_image *image)
{
    memory = NULL;
    pcow_map_destroy(map);
    pcow_close(image);
}

static void *load(void *opaque)
{
    (void)opaque;
    return memory[9 * CLUSTER] == BASE ? NULL : memory;
}

/* The old mapping is still there, and traps as it did until the watch takes its place. */
static void test_load_while_it_comes_under_watch(void **state)
{
    pcow_image *image = begin();
    void *wrong;

    (void)state;
    mode = REFUSED;
    MUST_FAIL(-ENOMEM, pcow_map_resolve(map, 20 * CLUSTER, 1, false, &error));
    assert_int_equal(slab_state(&map->slabs[0].status), SLAB_UNKNOWN);
    beside = load;
    mode = FIRST_LOADS;
    MUST(pcow_map_watch(map, &error));
    pthread_join(thread, &wrong);
    assert_null(wrong);
    end(image);
}

/* Space is not taken for pages that nobody asked for. */
static void test_load_of_what_is_not_known(void **state)
{
    pcow_image *image = begin();
    struct pcow_map_stats before, after;

    (void)state;
    mode = REFUSED;
    MUST_FAIL(-ENOMEM, pcow_map_resolve(map, 20 * CLUSTER, 1, false, &error));
    mode = WORKS;
    pcow_map_get_stats(map, &before);
    assert_int_equal(memory[9 * CLUSTER], BASE);
    pcow_map_get_stats(map, &after);
    assert_int_equal(after.pages_copied, before.pages_copied);
    end(image);
}

static void *ask(void *opaque)
{
    (void)opaque;
    if (pcow_map_resolve(map, 2 * CLUSTER, 1, true, NULL))
        return memory;
    return kernel_store(memory + 2 * CLUSTER, 9) == 1 ? NULL : memory;
}

/* Who asks for a page gets no answer from what was mapped before. */
static void test_asked_while_it_is_unmapped(void **state)
{
    pcow_image *image = begin();
    void *wrong;

    (void)state;
    beside = ask;
    mode = REFUSED_FOR_FILES;
    (void)pcow_map_prepare(map, 20 * CLUSTER, 1, false, NULL);
    assert_int_equal(mode, WORKS);
    pthread_join(thread, &wrong);
    assert_null(wrong);
    assert_int_equal(memory[2 * CLUSTER], 9);
    end(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_load_while_it_comes_under_watch, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_load_of_what_is_not_known, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_asked_while_it_is_unmapped, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
