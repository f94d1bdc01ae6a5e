/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Deletions of snapshots that fail in the middle of a merge, and the work that goes on with what
 * they leave: a guest that stores, more snapshots, more deletions. Slabs of several layers lie
 * among each other then, and own ones behind others.
 */
#include "support.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chain/chain.h"
#include "operations/operations.h"
#include "persist/observer.h"

#define SLABS 2u
#define USED 6u                        /* pages of a slab that are stored to */
#define PAGES (SLABS * USED)
#define MOST 12u                       /* snapshots */
#define STEPS 400u
#define ROUNDS 40u

struct state {
    uint32_t page[PAGES];              /* what is stored at its begin */
};

struct model {
    struct observer observer;
    pcow_image *image;
    pcow_map *map;
    struct state now, snapshot[MOST];
    unsigned name[MOST], count, next;
    uint32_t value;                    /* that was stored last */
    pthread_t owner;
    unsigned syncs, store_at, fail_at; /* of the operation that is under way; 0: never */
    int page;                          /* to be stored to then; -1: any */
};

static volatile uint32_t *address(const struct model *model, unsigned page)
{
    char *memory = pcow_map_address(model->map);

    return (volatile uint32_t *)(memory + page / USED * PCOW_SLAB_SIZE
                                 + page % USED * PCOW_PAGE_SIZE);
}

static void store(struct model *model, unsigned page)
{
    *address(model, page) = model->now.page[page] = ++model->value;
}

/* Mostly of the first slab. */
static unsigned any_page(void)
{
    return (unsigned)random() % (random() % 8 ? USED : PAGES);
}

static void *guest(void *opaque)
{
    struct model *model = opaque;

    store(model, model->page >= 0 ? (unsigned)model->page : any_page());
    return NULL;
}

/* A guest that stores meanwhile would wait for a slab that is claimed. */
static bool some_slab_is_claimed(const struct model *model)
{
    return model->image->chain->claim[0] || model->image->chain->claim[1];
}

static int look(struct observer *observer, const struct observation *observation)
{
    struct model *model = (struct model *)observer;

    if (observation->what != OBSERVED_SYNC || !pthread_equal(pthread_self(), model->owner)
        || !model->map)
        return 0;
    model->syncs++;
    if (model->store_at && model->syncs >= model->store_at && !some_slab_is_claimed(model)) {
        pthread_t thread;

        model->store_at = model->page >= 0 ? 0 : model->syncs + 1 + (unsigned)random() % 3;
        assert_int_equal(pthread_create(&thread, NULL, guest, model), 0);
        pthread_join(thread, NULL);
    }
    return model->syncs == model->fail_at ? -EIO : 0;
}

static const char *name_of(unsigned number)
{
    static char name[16];

    snprintf(name, sizeof name, "s%u", number);
    return name;
}

static void open_image(struct model *model)
{
    MUST(image_open(scratch("image"), PCOW_OPEN_WRITE, NULL, &model->observer, &model->image,
                    &error));
    MUST(pcow_map_create(model->image, NULL, &model->map, &error));
}

static void close_image(struct model *model)
{
    struct pcow_error told;

    /* That something has failed is told once. */
    pcow_map_flush(model->map, 0, SLABS * PCOW_SLAB_SIZE, &told);
    MUST(pcow_map_flush(model->map, 0, SLABS * PCOW_SLAB_SIZE, &error));
    pcow_map_destroy(model->map);
    model->map = NULL;
    pcow_close(model->image);
}

static void begin(struct model *model)
{
    *model = (struct model){
        .observer = {.look = look, .persistence = PCOW_PERSISTENCE_PAGE_CACHE},
        .owner = pthread_self(),
        .page = -1,
    };
    remove(scratch("image"));
    pcow_close(must_create(scratch("image"), SLABS * PCOW_SLAB_SIZE, 4096, NULL));
    open_image(model);
}

static void compare_pages(pcow_image *image, const struct state *state)
{
    for (unsigned page = 0; page < PAGES; page++) {
        uint32_t read;

        MUST(pcow_read(image, page / USED * PCOW_SLAB_SIZE + page % USED * PCOW_PAGE_SIZE, &read,
                       sizeof read, &error));
        assert_int_equal(read, state->page[page]);
    }
}

static void compare(const struct model *model)
{
    for (unsigned page = 0; page < PAGES; page++)
        assert_int_equal(*address(model, page), model->now.page[page]);
    compare_pages(model->image, &model->now);
}

/* As another process would find it. */
static void compare_all(struct model *model)
{
    compare(model);
    close_image(model);
    must_be_clean(scratch("image"));
    for (unsigned i = 0; i < model->count; i++) {
        pcow_image *image;

        MUST(pcow_open(scratch("image"), 0, name_of(model->name[i]), &image, &error));
        compare_pages(image, &model->snapshot[i]);
        pcow_close(image);
    }
    open_image(model);
    compare(model);
}

static void create(struct model *model)
{
    MUST(pcow_snapshot_create(model->image, name_of(model->next), &error));
    model->snapshot[model->count] = model->now;
    model->name[model->count++] = model->next++;
}

static void remove_from_model(struct model *model, unsigned one)
{
    model->count--;
    model->snapshot[one] = model->snapshot[model->count];
    model->name[one] = model->name[model->count];
}

/* Whether it worked or not: the snapshot is gone, or as it was. */
static int delete(struct model *model, unsigned one, unsigned store_at, unsigned fail_at)
{
    struct pcow_error said;
    int ret;

    model->syncs = 0;
    model->store_at = store_at;
    model->fail_at = fail_at;
    ret = pcow_snapshot_delete(model->image, name_of(model->name[one]), NULL, &said);
    model->store_at = model->fail_at = 0;
    if (!layer_find_name(model->image, name_of(model->name[one])))
        remove_from_model(model, one);
    return ret;
}

static void revert(struct model *model)
{
    unsigned one = (unsigned)random() % model->count;

    MUST(pcow_snapshot_revert(model->image, name_of(model->name[one]), &error));
    model->now = model->snapshot[one];
}

static void step(struct model *model)
{
    long what = random() % 100;

    store(model, any_page());
    if (model->count == MOST || (what < 45 && model->count > 0)) {
        unsigned one = (unsigned)random() % (random() % 2 ? model->count : 1);
        /*
         * A merge takes the syncs 1 and 2, and one for each slab of which the guest has stored
         * pages in between.
         */
        unsigned merges = (unsigned)random() % 3 * 2;

        delete (model, model->count - 1 - one, merges + 1 + (unsigned)random() % 3,
                random() % 2 ? merges + 3 : 0);
    } else if (what < 50 && model->count > 0) {
        revert(model);
    } else if (what < 85) {
        create(model);
    }
}

static void test_random(void **state)
{
    unsigned first = (unsigned)(getenv("PCOW_SEED") ? atoi(getenv("PCOW_SEED")) : 1);

    (void)state;
    for (unsigned seed = first; seed < first + ROUNDS; seed++) {
        struct model model;

        print_message("seed %u\n", seed);
        srandom(seed);
        begin(&model);
        for (unsigned i = 1; i <= STEPS; i++) {
            step(&model);
            if (i % 10 == 0)
                compare(&model);
            if (i % 100 == 0)
                compare_all(&model);
        }
        close_image(&model);
    }
}

/*
 * A hidden layer with two slabs of one guest slab, of which its child gets one before the disk
 * fails. The child is frozen, and merged into the next layer: this one's own slabs are in front of
 * the other one and behind it. The page behind it is own, and must not be copied once more.
 */
static void test_own_behind_another(void **state)
{
    struct model model;

    (void)state;
    begin(&model);
    create(&model);                    /* s0 */
    store(&model, USED);               /* takes a slab with a low number, to be free later */
    create(&model);                    /* s1 */
    MUST(pcow_snapshot_revert(model.image, "s0", &error));
    model.now = model.snapshot[0];
    store(&model, 1);
    create(&model);                    /* s2 */
    store(&model, 2);
    store(&model, 5);
    create(&model);                    /* s3 */
    store(&model, 3);
    assert_int_equal(delete(&model, 2, 0, 0), 0);
    model.page = 2;
    assert_int_equal(delete(&model, 2, 2, 3), -EIO);
    model.page = 1;
    create(&model);                    /* s4 */
    assert_int_equal(delete(&model, 1, 0, 0), 0);
    store(&model, 4);
    assert_int_equal(delete(&model, model.count - 1, 3, 0), 0);
    compare_all(&model);
    close_image(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_own_behind_another, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_random, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
