/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What is known of slabs and blocks that are free: none is forgotten, whoever works on them at the
 * same time, or a full pool is not full.
 */
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "chain/chain.h"
#include "chain/reclaim.h"
#include "image/prepare.h"
#include "image/remains.h"

#define SIZE (16 * MIB)
#define THREADS 4u

static int pool_setup(void **state)
{
    return pool_mount(state, "16m");
}

static uint64_t allocated(pcow_image *image)
{
    struct pcow_info info;

    pcow_get_info(image, &info);
    return info.allocated_size;
}

/* A copy that fails forgets what was prepared in the slab; those blocks are space. */
static void test_prepared_and_forgotten(void **state)
{
    (void)state;
    const unsigned prepared = 200;
    char page[4096] = {1};
    pcow_image *image;
    uint64_t before;

    image = must_create(path_in_pool("base.pcow"), SIZE, 4096, NULL);
    for (unsigned i = 0; i < 64; i++)
        MUST(pcow_write(image, i * sizeof page, page, sizeof page, &error));
    pcow_close(image);
    image = must_create(path_in_pool("top.pcow"), 0, 0, path_in_pool("base.pcow"));
    assert_non_null(chain_get(image, NULL));
    assert_int_equal(prepare_begin(image), 0);
    MUST(image_begin_change(image, &error));
    assert_int_equal(chain_own(image, 0, 0, 1, NULL, NULL, NULL), 0);
    before = allocated(image);
    assert_int_equal(prepare_blocks(image, slab_ref_slab(image->chain->head[0]), 100, prepared), 0);
    assert_int_equal(prepare_pages(image, slab_ref_slab(image->chain->head[0]), 100, prepared), 0);
    assert_true(allocated(image) >= before + prepared * sizeof page);
    pool_fill();
    assert_int_equal(chain_own(image, 0, 1, 63, NULL, NULL, NULL), -ENOSPC);
    assert_true(remains_are_due(image));
    reclaim(image, 0);
    assert_true(allocated(image) < before + prepared / 2 * sizeof page);
    assert_int_equal(chain_own(image, 0, 1, 63, NULL, NULL, NULL), 0);
    assert_reads(image, 0, page, sizeof page);
    prepare_end(image);
    pcow_close(image);
    must_be_clean(path_in_pool("top.pcow"));
}

/* Step by step what who frees a slab does, and who reclaims in the midst of it. */
static void test_marked_before_it_is_free(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, 0, NULL);
    uint64_t slab, before = allocated(image);

    MUST(image_begin_change(image, &error));
    assert_int_equal(slab_take(image, &slab), 0);
    assert_int_equal(file_allocate(&image->file, slab << SLAB_BITS, PCOW_SLAB_SIZE), 0);
    remains_leave(image, slab, PAGES_PER_SLAB);
    reclaim(image, 0);
    slab_untake(image, slab);
    assert_true(remains_are_due(image));
    reclaim(image, 0);
    assert_true(allocated(image) < before + PCOW_SLAB_SIZE / 2);
    assert_false(remains_are_due(image));
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

struct taker {
    pcow_image *image;
    uint64_t seed;
    pthread_barrier_t *barrier;
};

static void *take_and_give(void *opaque)
{
    struct taker *taker = opaque;
    uint64_t held[8];
    unsigned count = 0;

    pthread_barrier_wait(taker->barrier);
    for (unsigned i = 0; i < 300; i++) {
        if (count < 8 && random_next(&taker->seed) % 2)
            assert_int_equal(slab_take(taker->image, &held[count++]), 0);
        else if (count > 0)
            slab_untake(taker->image, held[--count]);
    }
    while (count > 0)
        slab_untake(taker->image, held[--count]);
    return NULL;
}

/* Below the hint nothing is free: it would never be found. */
static void test_the_hint(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, 0, NULL);
    pthread_barrier_t barrier;

    MUST(image_begin_change(image, &error));
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (unsigned round = 0; round < test_steps(100); round++) {
        struct taker takers[THREADS];
        pthread_t threads[THREADS];

        for (unsigned i = 0; i < THREADS; i++) {
            takers[i] = (struct taker){image, round * THREADS + i + 1, &barrier};
            assert_int_equal(pthread_create(&threads[i], NULL, take_and_give, &takers[i]), 0);
        }
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        for (uint64_t slab = 0; slab < image->free_hint; slab++)
            if (!slab_is_group_head(slab, image->file.heads)
                && !(image->used[slab / 64] & slab_bit(slab)))
                fail_msg("round %u: slab %llu is free, and looked for from %llu on", round,
                         (unsigned long long)slab, (unsigned long long)image->free_hint);
    }
    pthread_barrier_destroy(&barrier);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_prepared_and_forgotten, pool_setup, pool_unmount),
        cmocka_unit_test_setup_teardown(test_marked_before_it_is_free, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_the_hint, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
