/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What pcow.h lets any thread call while the map exists, beside operations that change what it is
 * about.
 */
#include "support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIZE (16 * MIB)

struct caller {
    pcow_map *map;
    atomic_bool stop;
    unsigned what;
};

static void *call(void *opaque)
{
    struct caller *caller = opaque;
    uint64_t seed = caller->what + 1;

    while (!atomic_load(&caller->stop)) {
        uint64_t offset = random_next(&seed) % (SIZE / 4096) * 4096;

        switch (caller->what) {
        case 0:
            pcow_map_settle(caller->map, 0, SIZE);
            break;
        case 1:
            pcow_map_resolve(caller->map, offset, 4096, false, NULL);
            break;
        case 2:
            pcow_map_resolve(caller->map, offset, 4096, true, NULL);
            break;
        case 3:
            pcow_map_flush(caller->map, 0, SIZE, NULL);
            break;
        case 4:
            pcow_map_watch(caller->map, NULL);
            break;
        default: {
            struct pcow_map_stats stats;
            struct pcow_event event;

            pcow_map_get_stats(caller->map, &stats);
            pcow_map_next_event(caller->map, &event);
            pcow_map_is_accessible(caller->map, offset, true);
        }
        }
    }
    return NULL;
}

static void start(struct caller *caller, pthread_t *thread)
{
    atomic_store(&caller->stop, false);
    assert_int_equal(pthread_create(thread, NULL, call, caller), 0);
}

static void end(struct caller *caller, pthread_t thread)
{
    atomic_store(&caller->stop, true);
    pthread_join(thread, NULL);
}

static void test_beside_revert(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned what = 0; what < 6; what++) {
            pcow_image *image = must_create(scratch("top.pcow"), SIZE, 0, NULL);
            pcow_map *map = must_map_by(image, engine, 0);
            unsigned char *memory = pcow_map_address(map);
            struct caller caller = {.map = map, .what = what};
            pthread_t thread;

            for (uint64_t at = 0; at < SIZE; at += PCOW_SLAB_SIZE)
                memory[at] = 1;
            MUST(pcow_snapshot_create(image, "s", &error));
            start(&caller, &thread);
            for (unsigned i = 0; i < (what < 2 ? 150 : 20); i++)
                MUST(pcow_snapshot_revert(image, "s", &error));
            end(&caller, thread);
            for (uint64_t at = 0; at < SIZE; at += PCOW_SLAB_SIZE / 2)
                assert_int_equal(memory[at], at % PCOW_SLAB_SIZE ? 0 : 1);
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(scratch("top.pcow"));
            unlink(scratch("top.pcow"));
        }
}

/*
 * The guest stands still during each create, and stores to all of its memory after the last: of
 * which nothing may come into the snapshot.
 */
static void test_beside_create(void **state)
{
    (void)state;
    FOR_EACH_ENGINE(engine)
        for (unsigned what = 0; what < 6; what++) {
            pcow_image *image = must_create(scratch("top.pcow"), SIZE, 0, NULL), *view;
            pcow_map *map = must_map_by(image, engine, 0);
            unsigned char *memory = pcow_map_address(map), *bytes = malloc(SIZE);
            struct caller caller = {.map = map, .what = what};
            pthread_t thread;
            char name[32];

            assert_non_null(bytes);
            for (unsigned round = 0; round < (what == 2 ? 4 : 1); round++) {
                start(&caller, &thread);
                for (unsigned i = 0; i < (what == 2 ? 30 : 5); i++) {
                    snprintf(name, sizeof name, "s%u-%u", round, i);
                    MUST(pcow_snapshot_create(image, name, &error));
                    usleep(200);
                }
                end(&caller, thread);
                snprintf(name, sizeof name, "last%u", round);
                MUST(pcow_snapshot_create(image, name, &error));
                for (uint64_t at = 0; at < SIZE; at += 4096)
                    memory[at] = (unsigned char)(round + 1);
                MUST(pcow_open(scratch("top.pcow"), PCOW_OPEN_FORCE_SHARE, name, &view, &error));
                MUST(pcow_read(view, 0, bytes, SIZE, &error));
                pcow_close(view);
                for (uint64_t at = 0; at < SIZE; at += 4096)
                    if (bytes[at] != round)
                        fail_msg("engine %d, call %u: page %llu of the snapshot was changed by a "
                                 "store after it",
                                 (int)engine, what, (unsigned long long)(at / 4096));
            }
            free(bytes);
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(scratch("top.pcow"));
            unlink(scratch("top.pcow"));
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_beside_revert, scratch_setup, scratch_teardown),
        cmocka_unit_test_setup_teardown(test_beside_create, scratch_setup, scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
