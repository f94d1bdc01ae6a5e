/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "minor": other threads store, load and ask while slabs come into minor mode and leave it.
 */
#include "scattered.h"

#include <pthread.h>
#include <stdatomic.h>

struct asker {
    pcow_map *map;
    _Atomic unsigned slab;
    atomic_bool stop;
    atomic_uint failed, loaded;
};

/*
 * Once it was asked for, a page can be loaded from for ever, whatever another one that stores is
 * about to do.
 */
static void *ask_and_load(void *opaque)
{
    struct asker *self = opaque;
    unsigned char byte;
    int pipe_of[2];

    if (pipe(pipe_of))
        return NULL;
    while (!atomic_load(&self->stop)) {
        uint64_t offset = atomic_load(&self->slab) * PCOW_SLAB_SIZE + 30 * CLUSTER;

        if (pcow_map_resolve(self->map, offset, 4096, false, NULL))
            atomic_fetch_add(&self->failed, 1);
        for (unsigned i = 0; i < 1000; i++) {
            if (write(pipe_of[1], (unsigned char *)pcow_map_address(self->map) + offset, 1) != 1
                || read(pipe_of[0], &byte, 1) != 1 || byte)
                atomic_fetch_add(&self->failed, 1);
            atomic_fetch_add(&self->loaded, 1);
        }
    }
    close(pipe_of[0]);
    close(pipe_of[1]);
    return NULL;
}

static void test_asking_beside_stores(void **state)
{
    (void)state;
    struct asker self = {0};
    unsigned minor = 0;
    pthread_t thread;

    for (unsigned round = 0; round < test_steps(400) / 20; round++) {
        pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
        unsigned char *memory;

        self.map = map_minor(image);
        if (!self.map)
            skip();
        memory = pcow_map_address(self.map);
        atomic_store(&self.stop, false);
        atomic_store(&self.slab, 0);
        assert_int_equal(pthread_create(&thread, NULL, ask_and_load, &self), 0);
        for (unsigned slab = 0; slab < SLABS; slab++) {
            /* He asks before the slab is in minor mode, or when it comes there, or later. */
            if (round % 2)
                atomic_store(&self.slab, slab);
            be_sparse(self.map);
            for (unsigned cluster = 0; cluster < 8; cluster++)
                memory[slab * PCOW_SLAB_SIZE + cluster * 3 * CLUSTER + 1] = 1;
            minor += is_minor(self.map, slab);
            usleep(round * 700);
            atomic_store(&self.slab, slab);
        }
        usleep(15000);
        atomic_store(&self.stop, true);
        pthread_join(thread, NULL);
        pcow_map_destroy(self.map);
        pcow_close(image);
        unlink(scratch("top.pcow"));
    }
    assert_int_equal(atomic_load(&self.failed), 0);
    assert_true(atomic_load(&self.loaded) > 0);
    assert_true(minor > 0);
}

struct filler {
    pcow_map *map;
    unsigned first, step;
    unsigned minor;                    /* clusters that it has met in a slab in minor mode */
};

static void *fill_clusters(void *opaque)
{
    struct filler *self = opaque;
    unsigned char *memory = pcow_map_address(self->map);

    for (unsigned i = 0, cluster = self->first; i < SLABS * CLUSTERS / self->step;
         i++, cluster += self->step)
        for (unsigned page = 0; page < CLUSTER / 4096; page++) {
            /*
             * Scattered, and twice: what a mapping that took another one's place had lost would be
             * seen.
             */
            uint64_t offset = (uint64_t)cluster * 37 % (SLABS * CLUSTERS) * CLUSTER + page * 4096;

            if (page == 0)
                be_sparse(self->map);
            memory[offset + 1]++;
            memory[offset + 2] = (unsigned char)(offset >> 12);
            memory[offset + 1]++;
            if (page == 0)
                self->minor += is_minor(self->map, offset / PCOW_SLAB_SIZE);
        }
    return NULL;
}

static void test_threads_store_meanwhile(void **state)
{
    (void)state;
    unsigned minor = 0;

    for (unsigned round = 0; round < test_steps(100) / 10; round++) {
        pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
        pcow_map *map = map_minor(image);
        struct filler fillers[3];
        pthread_t threads[3];

        if (!map)
            skip();
        for (unsigned i = 0; i < 3; i++) {
            /*
             * Clusters of one slab are everybody's; 3 and 256 have no divisor in common, so the
             * last ones are left.
             */
            fillers[i] = (struct filler){.map = map, .first = i, .step = 3};
            assert_int_equal(pthread_create(&threads[i], NULL, fill_clusters, &fillers[i]), 0);
        }
        for (unsigned i = 0; i < 3; i++) {
            pthread_join(threads[i], NULL);
            minor += fillers[i].minor;
        }
        for (unsigned i = 0; i < SLABS * CLUSTERS / 3 * 3; i++)
            for (unsigned page = 0; page < CLUSTER / 4096; page++) {
                uint64_t offset = (uint64_t)i * 37 % (SLABS * CLUSTERS) * CLUSTER + page * 4096;
                unsigned char bytes[3];

                MUST(pcow_read(image, offset, bytes, sizeof bytes, &error));
                assert_int_equal(bytes[1], 2);
                assert_int_equal(bytes[2], (unsigned char)(offset >> 12));
            }
        pcow_map_destroy(map);
        pcow_close(image);
        must_be_clean(scratch("top.pcow"));
        unlink(scratch("top.pcow"));
    }
    assert_true(minor > 0);
}

struct holder {
    pcow_map *map;
    atomic_bool holds, lets_go;
};

static void *be_inside(void *opaque)
{
    struct holder *self = opaque;

    gate_enter(self->map);
    atomic_store(&self->holds, true);
    usleep(100000);
    atomic_store(&self->lets_go, true);
    gate_leave(self->map);
    return NULL;
}

/*
 * Somebody may load meanwhile, and be about to map for stores what is the active layer's no more.
 */
static void test_a_snapshot_waits_for_who_maps(void **state)
{
    (void)state;
    pcow_image *image = must_create(scratch("top.pcow"), SIZE, CLUSTER, NULL);
    pcow_map *map = must_map_by(image, PCOW_ENGINE_MINOR, 0);
    struct holder self = {.map = map};
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, be_inside, &self), 0);
    while (!atomic_load(&self.holds))
        usleep(1000);
    MUST(pcow_snapshot_create(image, "s", &error));
    assert_true(atomic_load(&self.lets_go));
    pthread_join(thread, NULL);
    pcow_map_destroy(map);
    pcow_close(image);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_asking_beside_stores, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_threads_store_meanwhile, scratch_setup,
                                        scratch_teardown),
        cmocka_unit_test_setup_teardown(test_a_snapshot_waits_for_who_maps, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
