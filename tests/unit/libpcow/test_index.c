/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Lists of hundreds of slabs, with their indexes, compared with walks over them and with what was
 * stored.
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "chain/chain.h"
#include "chain/index.h"

#define SLABS 3u
#define SIZE (SLABS * PCOW_SLAB_SIZE)
#define PAGES (SLABS * PAGES_PER_SLAB)
#define USED 24u                       /* pages of a slab that are stored to */
#define MOST 400u                      /* snapshots */
#define STEPS 1500u

struct state {
    uint32_t page[PAGES];              /* what is stored at its begin */
};

struct model {
    pcow_image *image;
    pcow_map *map;
    struct state now, *snapshot;       /* MOST of them, */
    unsigned *name, count;             /* with their names */
    unsigned next;
};

static struct place walk(const pcow_image *image, uint64_t guest_slab, unsigned page)
{
    const struct chain *chain = image->chain;
    struct place place = {0};

    for (slab_ref ref = chain->head[guest_slab]; ref;
         ref = chain->file[slab_ref_level(ref)]->slabs[slab_ref_slab(ref)].next)
        if (page_set_has(&chain->file[slab_ref_level(ref)]->valid[slab_ref_slab(ref)], page)) {
            place.present = true;
            place.level = slab_ref_level(ref);
            place.offset = (slab_ref_slab(ref) << SLAB_BITS) + page * PCOW_PAGE_SIZE;
            break;
        }
    return place;
}

static void compare_lists(const struct model *model)
{
    for (uint64_t v = 0; v < SLABS; v++) {
        unsigned pieces = 0;

        for (unsigned page = 0; page < PAGES_PER_SLAB; pieces++) {
            struct place found = chain_find(model->image, v, page, PAGES_PER_SLAB);

            for (unsigned i = 0; i < found.pages; i++) {
                struct place walked = walk(model->image, v, page + i);

                assert_int_equal(walked.present, found.present);
                assert_int_equal(walked.level, found.level);
                if (walked.present)
                    assert_int_equal(walked.offset, found.offset + i * PCOW_PAGE_SIZE);
            }
            page += found.pages;
        }
        assert_int_equal(pieces, chain_count_pieces(model->image, v, PAGES_PER_SLAB));
    }
}

static void compare(const struct model *model)
{
    const char *memory = pcow_map_address(model->map);

    compare_lists(model);
    for (unsigned page = 0; page < PAGES; page++) {
        uint32_t found, read;

        memcpy(&found, memory + page * PCOW_PAGE_SIZE, sizeof found);
        MUST(pcow_read(model->image, page * PCOW_PAGE_SIZE, &read, sizeof read, &error));
        assert_int_equal(found, model->now.page[page]);
        assert_int_equal(read, model->now.page[page]);
    }
}

static void store(struct model *model, uint32_t value)
{
    volatile char *memory = pcow_map_address(model->map);

    for (unsigned i = 0; i < 3; i++) {
        unsigned page = (unsigned)(random() % SLABS * PAGES_PER_SLAB + random() % USED);

        *(volatile uint32_t *)(memory + page * PCOW_PAGE_SIZE) = value;
        model->now.page[page] = value;
    }
}

static const char *name_of(unsigned number)
{
    static char name[16];

    snprintf(name, sizeof name, "s%u", number);
    return name;
}

static void create(struct model *model)
{
    MUST(pcow_snapshot_create(model->image, name_of(model->next), &error));
    model->snapshot[model->count] = model->now;
    model->name[model->count++] = model->next++;
}

static void delete(struct model *model)
{
    unsigned one = (unsigned)random() % model->count;

    MUST(pcow_snapshot_delete(model->image, name_of(model->name[one]), NULL, &error));
    model->count--;
    model->snapshot[one] = model->snapshot[model->count];
    model->name[one] = model->name[model->count];
}

static void revert(struct model *model)
{
    unsigned one = (unsigned)random() % model->count;

    MUST(pcow_snapshot_revert(model->image, name_of(model->name[one]), &error));
    model->now = model->snapshot[one];
}

/* The index is built anew, and no slab of the active layer need be in front of it. */
static void map_again(struct model *model)
{
    pcow_map_destroy(model->map);
    MUST(pcow_map_create(model->image, NULL, &model->map, &error));
}

static void step(struct model *model, uint32_t value)
{
    long what = random() % 100;

    store(model, value);
    if (model->count == MOST || (what < 8 && model->count > 0))
        delete(model);
    else if (what < 10 && model->count > 0)
        revert(model);
    else if (what < 12)
        map_again(model);
    else if (what < 90)
        create(model);
}

static void check_snapshots(const struct model *model)
{
    for (unsigned i = 0; i < model->count; i += 7) {
        pcow_image *image;

        MUST(pcow_open(scratch("image"), PCOW_OPEN_FORCE_SHARE, name_of(model->name[i]), &image,
                       &error));
        for (unsigned page = 0; page < PAGES; page++) {
            uint32_t read;

            MUST(pcow_read(image, page * PCOW_PAGE_SIZE, &read, sizeof read, &error));
            assert_int_equal(read, model->snapshot[i].page[page]);
        }
        pcow_close(image);
    }
}

static void begin(struct model *model)
{
    *model = (struct model){.snapshot = calloc(MOST, sizeof *model->snapshot),
                            .name = calloc(MOST, sizeof *model->name)};
    /* Of a try before. */
    unlink(scratch("image"));
    model->image = must_create(scratch("image"), SIZE, 4096, NULL);
    MUST(pcow_map_create(model->image, NULL, &model->map, &error));
}

static void end(struct model *model)
{
    compare(model);
    pcow_map_destroy(model->map);
    pcow_close(model->image);
    check_snapshots(model);
    must_be_clean(scratch("image"));
    free(model->snapshot);
    free(model->name);
}

static void test_random(void **state)
{
    unsigned seed = (unsigned)(getenv("PCOW_SEED") ? atoi(getenv("PCOW_SEED")) : 1);
    struct model model;

    (void)state;
    srandom(seed);
    begin(&model);
    for (uint32_t i = 1; i <= STEPS; i++) {
        step(&model, i);
        if (i % 25 == 0)
            compare(&model);
    }
    print_message("seed %u: %u snapshots, %u indexes\n", seed, model.count,
                  model.image->chain->indexes);
    assert_int_equal(model.image->chain->indexes, SLABS);
    end(&model);
}

static void store_page(struct model *model, unsigned page, uint32_t value)
{
    char *memory = pcow_map_address(model->map);

    model->now.page[page] = value;
    *(volatile uint32_t *)(memory + page * PCOW_PAGE_SIZE) = value;
}

/* A list of slabs with one page each, and an index that counts from the first of them on. */
static void make_list(struct model *model)
{
    begin(model);
    for (unsigned i = 0; i < LONG_LIST + 1; i++) {
        store_page(model, i, i + 1);
        create(model);
    }
    map_again(model);
    assert_int_equal(model->image->chain->index[0].from, model->image->chain->head[0]);
}

static void delete_newest(struct model *model)
{
    model->count--;
    MUST(pcow_snapshot_delete(model->image, name_of(model->name[model->count]), NULL, &error));
}

/* The slab from which the index counts becomes the active layer's, and gets pages. */
static void test_given(void **state)
{
    struct model model;

    (void)state;
    make_list(&model);
    delete_newest(&model);
    store_page(&model, 3, 1000);
    end(&model);
}

/* False: another slab came, as the thread of the map had one ready at that moment. */
static bool use_again(void)
{
    struct model model;
    slab_ref from;
    bool same;

    make_list(&model);
    from = model.image->chain->head[0];
    store_page(&model, LONG_LIST, 1000);
    delete_newest(&model);
    create(&model);
    store_page(&model, 3, 1001);
    same = model.image->chain->head[0] == from;
    end(&model);
    return same;
}

/* That slab is taken off the list, and comes back at its head with other pages. */
static void test_used_again(void **state)
{
    unsigned tries = 0;

    (void)state;
    while (!use_again())
        assert_true(++tries < 50);
}

static uint64_t resident(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long long size, pages;

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%llu %llu", &size, &pages), 2);
    fclose(file);
    return pages * 4096;
}

/* As QEMU's mem-lock=on does it: memory that is mapped is there at once. */
static void test_locked_memory(void **state)
{
    struct model model;
    uint64_t before;

    (void)state;
    if (mlockall(MCL_FUTURE))
        skip();
    begin(&model);
    pcow_map_destroy(model.map);
    pcow_close(model.image);
    model.image = must_open(scratch("image"), PCOW_OPEN_WRITE);
    before = resident();
    MUST(pcow_map_create(model.image, NULL, &model.map, &error));
    print_message("%llu KiB\n", (unsigned long long)(resident() - before) >> 10);
    assert_true(resident() - before < 8 * MIB);
    for (unsigned i = 0; i < LONG_LIST + 1; i++) {
        store_page(&model, i, i + 1);
        create(&model);
    }
    map_again(&model);
    assert_int_not_equal(model.image->chain->index[0].from, 0);
    munlockall();
    end(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_given, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_used_again, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_random, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_locked_memory, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
