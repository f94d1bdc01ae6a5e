/* SPDX-License-Identifier: BSD-3-Clause */
/* The sizes of snapshots against what opening, and deleting, them shows. */
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "image/image.h"

#define SIZE (8 * MIB)

/* Pages that a view finds in this file. */
static uint64_t visible_size(const char *path, const char *snapshot)
{
    struct pcow_extent extent;
    uint64_t size = 0;
    pcow_image *view;

    MUST(pcow_open(path, 0, snapshot, &view, &error));
    for (uint64_t offset = 0; offset < pcow_size(view); offset += extent.length) {
        MUST(pcow_get_extent(view, offset, pcow_size(view) - offset, &extent, &error));
        size += extent.present && extent.depth == 0 ? extent.length : 0;
    }
    pcow_close(view);
    return size;
}

static void check_list(pcow_image *image, const struct pcow_snapshot *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t seen = visible_size(pcow_path(image), list[i].name);

        /* Own pages behind the end of a shrunken layer are held, and not seen. */
        if (list[i].data_size + list[i].shared_size < seen
            || (list[i].virtual_size == SIZE && list[i].data_size + list[i].shared_size != seen))
            fail_msg("%s: own %llu, shared %llu, seen %llu", list[i].name,
                     (unsigned long long)list[i].data_size, (unsigned long long)list[i].shared_size,
                     (unsigned long long)seen);
    }
}

static void change(pcow_image *image, unsigned number, uint64_t *seed)
{
    static unsigned char bytes[64 * 4096];
    struct pcow_snapshot *list;
    char name[32];
    size_t count;
    const struct pcow_snapshot *chosen;

    MUST(pcow_snapshot_list(image, &list, &count, &error));
    check_list(image, list, count);
    chosen = count ? &list[random_next(seed) % count] : NULL;
    snprintf(name, sizeof name, "n%u", number);
    switch (random_next(seed) % 8) {
    case 0: case 1: {
        uint64_t freed, expected = chosen ? chosen->delete_frees : 0;

        if (!chosen)
            break;
        MUST(pcow_snapshot_delete(image, chosen->name, &freed, &error));
        if (freed != expected)
            fail_msg("%s: %llu bytes expected, %llu freed", chosen->name,
                     (unsigned long long)expected, (unsigned long long)freed);
        break;
    }
    case 2:
        if (chosen)
            MUST(pcow_snapshot_revert(image, chosen->name, &error));
        break;
    case 3:
        if (random_next(seed) % 4 == 0)
            MUST(pcow_resize(image, pcow_size(image) == SIZE ? SIZE / 2 : SIZE, true, &error));
        break;
    case 4:
        if (chosen && chosen->state_size == 0) {
            MUST(pcow_snapshot_write_state(image, chosen->name, 0, memset(bytes, 7, 10000), 10000,
                                           &error));
            MUST(pcow_snapshot_set_state_size(image, chosen->name, 10000, &error));
        }
        break;
    default:
        for (unsigned i = 0; i < 3; i++) {
            fill_pattern(bytes, sizeof bytes, seed);
            MUST(pcow_write(image, random_next(seed) % (pcow_size(image) / 4096 - 64) * 4096, bytes,
                            (1 + random_next(seed) % 64) * 4096, &error));
        }
        MUST(pcow_snapshot_create(image, name, &error));
        break;
    }
    free(list);
}

static void test_sizes_are_what_is_seen_and_freed(void **state)
{
    uint64_t seed = random_seed();

    (void)state;
    for (unsigned i = 0; i < test_steps(8); i++) {
        char path[32];

        snprintf(path, sizeof path, "t%u", i);
        pcow_image *image = must_create(scratch(path), SIZE, 4096, NULL);

        for (unsigned step = 0; step < 60; step++)
            change(image, step, &seed);
        pcow_close(image);
        must_be_clean(scratch(path));
    }
}

static void test_a_list_of_many(void **state)
{
    const unsigned many = 3000;
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 4096, NULL);
    struct pcow_snapshot *list;
    size_t count;

    (void)state;
    /* All write to one slab, some of them to the same page: the deepest row there can be. */
    for (unsigned i = 0; i < many; i++) {
        char name[32];

        snprintf(name, sizeof name, "s%u", i);
        MUST(pcow_write(image, i % 500 * 4096, name, sizeof name, &error));
        MUST(pcow_snapshot_create(image, name, &error));
    }
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, many);
    assert_int_equal(list[499].data_size, 4096);
    assert_int_equal(list[499].shared_size, 499 * 4096);
    assert_int_equal(list[many - 1].shared_size, 499 * 4096);
    assert_int_equal(list[0].delete_frees, 0);         /* the next one does not hold its page */
    free(list);
    pcow_close(image);
}

static void test_delete_frees_what_nobody_else_needs(void **state)
{
    pcow_image *image = must_create(scratch("t"), 4 * MIB, 4096, NULL);
    char bytes[8 * 4096];
    struct pcow_snapshot *list;
    uint64_t freed;
    size_t count;

    (void)state;
    memset(bytes, 1, sizeof bytes);
    MUST(pcow_write(image, 0, bytes, 8 * 4096, &error));
    MUST(pcow_snapshot_create(image, "fork point", &error));
    MUST(pcow_write(image, 0, bytes, 2 * 4096, &error));
    MUST(pcow_snapshot_create(image, "left", &error));
    MUST(pcow_snapshot_revert(image, "fork point", &error));
    MUST(pcow_write(image, 4096, bytes, 5 * 4096, &error));
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 2);
    assert_int_equal(list[0].delete_frees, 0);         /* both branches need it */
    assert_int_equal(list[1].delete_frees, 2 * 4096);
    free(list);
    MUST(pcow_snapshot_delete(image, "fork point", &freed, &error));
    assert_int_equal(freed, 0);
    /*
     * Now it is kept for the left branch and the present state; without the left one, what the
     * latter has rewritten goes too.
     */
    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(list[0].delete_frees, 7 * 4096);
    assert_int_equal(list[0].shared_size, 6 * 4096);
    free(list);
    MUST(pcow_snapshot_delete(image, "left", &freed, &error));
    assert_int_equal(freed, 7 * 4096);
    pcow_close(image);
    must_be_clean(scratch("t"));
}

/* ---- a file made to hold up who lists it ----------------------------------------------------- */

#define SIBLINGS 2000u
#define MANY_SLABS 16384u

/* All of them stand on "root", and each says that it sees nothing of it. */
static void make_siblings(void)
{
    pcow_image *image = must_create_without_mirror(scratch("t"), MANY_SLABS * PCOW_SLAB_SIZE);

    MUST(pcow_snapshot_create(image, "root", &error));
    for (unsigned i = 0; i < SIBLINGS; i++) {
        char name[32];

        MUST(pcow_snapshot_revert(image, "root", &error));
        snprintf(name, sizeof name, "sibling-%u", i);
        MUST(pcow_snapshot_create(image, name, &error));
        MUST(layer_store_word(image, layer_find_name(image, name),
                              offsetof(struct layer_record, parent_limit), 0, &error));
    }
    pcow_close(image);
}

/* A file of 32 GiB, nearly all hole, all slabs of which belong to "root". */
static void give_root_many_slabs(void)
{
    static uint64_t words[MANY_SLABS];
    static struct page_set valid[MANY_SLABS];
    int fd = open(scratch("t"), O_RDWR | O_CLOEXEC);

    for (uint32_t slab = 1; slab < MANY_SLABS; slab++) {
        words[slab] = owner_encode((struct owner){OWNER_DATA, 1, slab});
        page_set_add_range(&valid[slab], 0, 1);
    }
    assert_int_equal(ftruncate(fd, (off_t)(MANY_SLABS * PCOW_SLAB_SIZE)), 0);
    assert_int_equal(pwrite(fd, words, sizeof words, SLAB_TABLE_OFFSET), sizeof words);
    assert_int_equal(pwrite(fd, valid, sizeof valid, BITMAP_OFFSET), sizeof valid);
    close(fd);
}

static double time_of_list(void)
{
    pcow_image *image = must_open(scratch("t"), 0);
    clock_t begun = clock();
    struct pcow_snapshot *list;
    size_t count;

    MUST(pcow_snapshot_list(image, &list, &count, &error));
    assert_int_equal(count, 1 + SIBLINGS);
    assert_int_equal(list[0].data_size, (MANY_SLABS - 1) * 4096);
    free(list);
    begun = clock() - begun;
    pcow_close(image);
    return (double)begun / CLOCKS_PER_SEC;
}

/* By the time of the processor. Before there was a limit: 13 s. */
static void test_list_of_many_that_cut(void **state)
{
    double time;

    (void)state;
    make_siblings();
    give_root_many_slabs();
    time = time_of_list();
    print_message("%u layers that cut %u slabs: %.3f s\n", SIBLINGS, MANY_SLABS, time);
    assert_true(time < 2);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, scratch_setup, scratch_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes_are_what_is_seen_and_freed),
        TEST(test_a_list_of_many),
        TEST(test_delete_frees_what_nobody_else_needs),
        TEST(test_list_of_many_that_cut),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
