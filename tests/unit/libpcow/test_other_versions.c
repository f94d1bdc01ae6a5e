/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Programs that were compiled with an older or a newer pcow.h: their structures are shorter or
 * longer than the library's.
 */
#include "support.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIZE (8 * MIB)
#define MORE 24u                       /* bytes by which a newer structure is longer */
#define UNTOUCHED 0xa5

/* What is told, into a structure of this many bytes. */
typedef void (*tell_fn)(void *given, size_t size);

static pcow_image *image;
static pcow_map *map;
static const char *path;

static void tell_info(void *given, size_t size)
{
    pcow_get_info_sized(image, given, size);
}

static void tell_stats(void *given, size_t size)
{
    pcow_map_get_stats_sized(map, given, size);
}

static void tell_summary(void *given, size_t size)
{
    MUST(pcow_summarize_sized(AT_FDCWD, path, false, given, size, &error));
}

static void tell_check(void *given, size_t size)
{
    MUST(pcow_check_sized(path, PCOW_CHECK_FORCE_SHARE, NULL, NULL, NULL, given, size, &error));
}

static void tell_data(void *given, size_t size)
{
    MUST(pcow_check_data_sized(path, PCOW_CHECK_FORCE_SHARE, NULL, NULL, NULL, given, size,
                               &error));
}

static void check_told(tell_fn tell, size_t size)
{
    unsigned char *whole = calloc(1, size), *other = malloc(size + MORE);

    assert_true(whole && other);
    tell(whole, size);
    /* An older program: what it has no room for, behind its structure, is its own. */
    for (size_t known = 0; known < size; known += 8) {
        memset(other, UNTOUCHED, size);
        tell(other, known);
        assert_memory_equal(other, whole, known);
        for (size_t i = known; i < size; i++)
            assert_int_equal(other[i], UNTOUCHED);
    }
    /* A newer one: what the library does not know is 0. */
    memset(other, UNTOUCHED, size + MORE);
    tell(other, size + MORE);
    assert_memory_equal(other, whole, size);
    for (size_t i = size; i < size + MORE; i++)
        assert_int_equal(other[i], 0);
    free(other);
    free(whole);
}

static void test_what_is_told(void **state)
{
    struct pcow_map_options options = {.full_policy = PCOW_FULL_FAIL, .prepared_slabs = 1};
    struct pcow_map_stats stats = {0};

    (void)state;
    path = scratch("image.pcow");
    image = must_create(path, SIZE, 0, NULL);
    MUST(pcow_write(image, 0, path, 4, &error));
    MUST(pcow_map_create(image, &options, &map, &error));
    *(volatile char *)pcow_map_address(map) = 1;
    while (stats.slabs_ready < 1)      /* nothing changes any more */
        pcow_map_get_stats(map, &stats);
    check_told(tell_info, sizeof(struct pcow_info));
    check_told(tell_stats, sizeof(struct pcow_map_stats));
    check_told(tell_summary, sizeof(struct pcow_summary));
    check_told(tell_check, sizeof(struct pcow_check_result));
    check_told(tell_data, sizeof(struct pcow_data_result));
    pcow_map_destroy(map);
    pcow_close(image);
}

static void test_an_older_program_creates(void **state)
{
    struct pcow_create_options options = {.virtual_size = SIZE};

    (void)state;
    /* What is behind the only member that it knew is not read. */
    options.cluster_size = 5;
    MUST(pcow_create_sized(scratch("old.pcow"), &options, sizeof options.virtual_size, &error));
    image = must_open(scratch("old.pcow"), 0);
    assert_int_equal(pcow_size(image), SIZE);
    pcow_close(image);
    options.cluster_size = 0;
    options.no_mirror = true;
    MUST(pcow_create_sized(scratch("new.pcow"), &options,
                           offsetof(struct pcow_create_options, no_mirror), &error));
    image = must_open(scratch("new.pcow"), 0);
    assert_int_equal(pcow_size(image), SIZE);
    pcow_close(image);
}

static void test_a_newer_program_creates(void **state)
{
    struct {
        struct pcow_create_options known;
        unsigned char more[MORE];
    } options = {.known = {.virtual_size = SIZE}};

    (void)state;
    MUST(pcow_create_sized(scratch("plain.pcow"), &options.known, sizeof options, &error));
    for (unsigned i = 0; i < MORE; i++) {
        memset(options.more, 0, sizeof options.more);
        options.more[i] = 1;
        MUST_FAIL(-E2BIG, pcow_create_sized(scratch("asking.pcow"), &options.known,
                                            sizeof options, &error));
        assert_int_equal(access(scratch("asking.pcow"), F_OK), -1);
    }
}

static void test_programs_map(void **state)
{
    struct {
        struct pcow_map_options known;
        unsigned char more[MORE];
    } options = {.known = {.full_policy = PCOW_FULL_FAIL, .vma_budget = 7000}};
    struct pcow_map_stats stats;

    (void)state;
    image = must_create(scratch("image.pcow"), SIZE, 0, NULL);
    options.more[MORE - 1] = 1;
    MUST_FAIL(-E2BIG,
              pcow_map_create_sized(image, &options.known, sizeof options, &map, &error));
    assert_null(map);
    options.more[MORE - 1] = 0;
    MUST(pcow_map_create_sized(image, &options.known, sizeof options, &map, &error));
    pcow_map_get_stats(map, &stats);
    assert_int_equal(stats.vma_budget, 7000);
    pcow_map_destroy(map);
    /* The budget is behind what an older one knew. */
    MUST(pcow_map_create_sized(image, &options.known, offsetof(struct pcow_map_options, vma_budget),
                               &map, &error));
    pcow_map_get_stats(map, &stats);
    assert_int_not_equal(stats.vma_budget, 7000);
    pcow_map_destroy(map);
    MUST(pcow_map_create(image, NULL, &map, &error));
    pcow_map_destroy(map);
    pcow_close(image);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_what_is_told),
        TEST(test_an_older_program_creates),
        TEST(test_a_newer_program_creates),
        TEST(test_programs_map),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
