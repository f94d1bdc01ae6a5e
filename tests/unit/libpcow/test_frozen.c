/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What was prepared for stores to a layer is of no use once a snapshot has frozen it, and goes back
 * to the pool while the guest goes on.
 */
#include "support.h"

#include <string.h>
#include <unistd.h>

#include "image/image.h"
#include "image/prepare.h"

#define SLABS 16u
#define SLAB PCOW_SLAB_SIZE
#define SNAPSHOTS 5u

/* Without what lies ready for the next stores: a lead that grows with their rate. */
static uint64_t allocated(pcow_image *image)
{
    struct pcow_info info;
    uint64_t ready = image->ready ? prepared_count(image) * PCOW_SLAB_SIZE : 0;

    pcow_get_info(image, &info);
    return info.allocated_size > ready ? info.allocated_size - ready : 0;
}

static void test_snapshots_do_not_keep_what_was_prepared(void **state)
{
    const struct pcow_map_options options = {.prepared_slabs = 4, .full_policy = PCOW_FULL_FAIL};
    /*
     * Of 160 MiB that the frozen slabs were given. The active layer has 8 slabs, and one or two are
     * being made ready.
     */
    const uint64_t most = 64 * MIB;
    uint64_t before, held = 0;
    volatile unsigned char *memory;
    pcow_image *image;
    pcow_map *map;

    (void)state;
    image = must_create(scratch("top.pcow"), 64 * MIB, 4 * KIB, NULL);
    before = allocated(image);
    MUST(pcow_map_create(image, &options, &map, &error));
    memory = pcow_map_address(map);
    for (unsigned s = 0; s < SNAPSHOTS; s++) {
        char name[2] = {(char)('a' + s), 0};

        for (unsigned i = 0; i < SLABS; i++) {
            memory[i * SLAB + s * 64 * KIB] = (unsigned char)(s + 1);
            usleep(1000);
        }
        MUST(pcow_snapshot_create(image, name, &error));
    }
    /* The guest traps all the time; when it is idle for 5 s that alone gives it back. */
    for (unsigned i = 0; i < 400; i++) {
        memory[(SLABS + i % 8) * SLAB + i / 8 * 8 * 4096] = 1;
        held = allocated(image);
        held = held > before ? held - before : 0;
        if (held <= most)
            break;
        usleep(10000);
    }
    if (held > most)
        fail_msg("%llu MiB are kept", (unsigned long long)held / MIB);
    for (unsigned s = 0; s < SNAPSHOTS; s++)
        for (unsigned i = 0; i < SLABS; i++)
            assert_int_equal(memory[i * SLAB + s * 64 * KIB], s + 1);
    pcow_map_destroy(map);
    pcow_close(image);
    must_be_clean(scratch("top.pcow"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_snapshots_do_not_keep_what_was_prepared, scratch_setup,
                                        scratch_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
