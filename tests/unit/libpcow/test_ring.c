/* SPDX-License-Identifier: BSD-3-Clause */
/* The ring of prepared slabs (image/prepare.h) by itself, without a map. */
#include "support.h"

#include <pthread.h>
#include <sched.h>

#include "image/prepare.h"
#include "image/remains.h"

struct poppers {
    pcow_image *image;
    unsigned popped, wrong;
    uint8_t out[64];                   /* by slab: somebody has it */
    bool end;
};

static void *pop(void *opaque)
{
    struct poppers *poppers = opaque;
    uint64_t slab;

    while (!__atomic_load_n(&poppers->end, __ATOMIC_ACQUIRE)) {
        if (!prepared_pop(poppers->image, &slab))
            continue;
        if (slab == 0 || slab >= sizeof poppers->out
            || __atomic_exchange_n(&poppers->out[slab], 1, __ATOMIC_ACQ_REL)) {
            __atomic_fetch_add(&poppers->wrong, 1, __ATOMIC_RELAXED);
        } else {
            __atomic_store_n(&poppers->out[slab], 0, __ATOMIC_RELEASE);
            remains_discard(poppers->image, slab, 0, PAGES_PER_SLAB);
            slab_untake(poppers->image, slab);
        }
        __atomic_fetch_add(&poppers->popped, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/*
 * The stores are faster than the thread: each slab is waited for. None is had twice, and never slab
 * 0, which is the header.
 */
static void test_empty_ring(void **state)
{
    struct poppers poppers = {.image = must_create(scratch("top.pcow"), 64 * MIB, 0, NULL)};
    pthread_t threads[2];

    (void)state;
    assert_int_equal(prepare_begin(poppers.image), 0);
    for (unsigned t = 0; t < 2; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, pop, &poppers), 0);
    for (unsigned i = 0; i < 400; i++) {
        while (prepare_one(poppers.image) == -EAGAIN)
            sched_yield();
        while (__atomic_load_n(&poppers.popped, __ATOMIC_ACQUIRE) <= i)
            sched_yield();
    }
    __atomic_store_n(&poppers.end, true, __ATOMIC_RELEASE);
    for (unsigned t = 0; t < 2; t++)
        pthread_join(threads[t], NULL);
    assert_int_equal(poppers.wrong, 0);
    assert_int_equal(poppers.popped, 400);
    prepare_end(poppers.image);
    pcow_close(poppers.image);
    must_be_clean(scratch("top.pcow"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_empty_ring, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
