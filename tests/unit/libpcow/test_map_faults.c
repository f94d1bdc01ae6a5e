/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A mapping of the guest's memory that the kernel refuses once: the next access must find its way,
 * and not trap for ever.
 */
#include "support.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "operations/operations.h"
#include "persist/observer.h"
#include "util/order.h"

/*
 * Lets the next mapping in the guest's range fail, and takes away what was there, as the kernel may
 * have done by then.
 */
struct refusing {
    struct observer observer;
    const unsigned char *memory;
    size_t size;
    _Atomic(bool) armed;
    bool takes_away;
};

static int look(struct observer *observer, const struct observation *observation)
{
    struct refusing *refusing = (struct refusing *)observer;
    const unsigned char *address = observation->address;

    if (observation->what != OBSERVED_MAP || !atomic_load(&refusing->armed)
        || address < refusing->memory || address >= refusing->memory + refusing->size
        || !atomic_exchange(&refusing->armed, false))
        return 0;
    if (refusing->takes_away)
        order_mmap((void *)address, observation->length, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return -ENOMEM;
}

static pcow_map *open_and_map(struct refusing *refusing, enum pcow_engine engine,
                              pcow_image **image)
{
    struct pcow_map_options options = {.engine = engine, .serves_sigbus = serve_bus()};
    pcow_map *map;

    MUST(image_open(scratch("t"), PCOW_OPEN_WRITE, NULL, &refusing->observer, image, &error));
    MUST(pcow_map_create(*image, &options, &map, &error));
    refusing->memory = pcow_map_address(map);
    refusing->size = pcow_size(*image);
    return map;
}

/*
 * A page that is mapped for stores is mapped again with its neighbours, and that takes its mapping
 * away.
 */
static void test_lost_mapping_of_an_own_page(void **state)
{
    static unsigned char bytes[2 * MIB];

    (void)state;
    memset(bytes, 1, sizeof bytes);
    FOR_EACH_ENGINE(engine)
        for (unsigned takes_away = 0; takes_away < 2; takes_away++) {
            struct refusing refusing = {
                .observer = {.persistence = PCOW_PERSISTENCE_VOLATILE, .look = look},
                .takes_away = takes_away};
            volatile unsigned char *memory;
            pcow_image *image, *view;
            pcow_map *map;

            unlink(scratch("t"));
            image = must_create(scratch("t"), 8 * MIB, 64 * KIB, NULL);
            MUST(pcow_write(image, 0, bytes, sizeof bytes, &error));
            MUST(pcow_snapshot_create(image, "old", &error));
            pcow_close(image);
            map = open_and_map(&refusing, engine, &image);
            memory = (unsigned char *)refusing.memory;
            memory[40 * 4096] = 2;         /* alone */
            refusing.armed = true;
            assert_int_equal(pcow_map_resolve(map, 41 * 4096, 4096, true, NULL), -ENOMEM);
            assert_false(refusing.armed);
            alarm(30);
            assert_int_equal(memory[40 * 4096], 2);
            memory[40 * 4096] = 3;
            alarm(0);
            /* If the old mapping has stayed, it is not forgotten. */
            refusing.armed = !takes_away;
            assert_int_equal(pcow_map_resolve(map, 42 * 4096, 4096, true, NULL),
                             takes_away ? 0 : -ENOMEM);
            assert_false(refusing.armed);
            MUST(pcow_snapshot_create(image, "new", &error));
            alarm(30);
            for (unsigned page = 0; page < 512; page++)
                memory[page * 4096] = 4;
            alarm(0);
            MUST(pcow_open(scratch("t"), 0, "new", &view, &error));
            for (unsigned page = 0; page < 64; page++)
                assert_reads(view, page * 4096, (const char[1]){page == 40 ? 3 : 1}, 1);
            pcow_close(view);
            pcow_map_destroy(map);
            pcow_close(image);
            must_be_clean(scratch("t"));
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_lost_mapping_of_an_own_page, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
