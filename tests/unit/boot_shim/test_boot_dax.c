/* SPDX-License-Identifier: BSD-3-Clause */
/* When the root is used with DAX, and what is said if it is not, or in small pages. */
#include "place.h"

#include <string.h>

#include "config/dax.h"

#define MIB (1u << 20)

static const struct {
    struct volume root;
    unsigned version;
    bool fs_dax;
    const char *option, *why; /* what is in it */
} cases[] = {
    {{.type = "ext4", .dax = true}, 6001, true, "dax=always", NULL},
    {{.type = "ext4", .dax = true, .partition = 1, .start = 4 * MIB}, 5008, true, "dax=always",
     NULL},
    {{.type = "ext4", .dax = true, .partition = 1, .start = 4 * MIB}, 5004, true, "dax", NULL},
    {{.type = "ext4", .dax = true, .partition = 1, .start = MIB}, 6001, true, "dax=always",
     "multiple of 2 MiB"},
    {{.type = "ext4", .dax = false, .partition = 1, .start = 63 * 512}, 6001, true, NULL,
     "multiple of 4 KiB"},
    {{.type = "ext4", .dax = false, .partition = 1, .start = 4 * MIB}, 6001, true, NULL, "blocks"},
    {{.type = "ext4", .dax = true, .partition = 1, .start = 4 * MIB}, 6001, false, NULL, "built"},
    {{.type = "xfs", .dax = true, .partition = 1, .start = 4 * MIB}, 6001, true, "dax=always",
     NULL},
    {{.type = "xfs", .reflink = true, .dax = false, .partition = 1, .start = 4 * MIB}, 6012, true,
     NULL, "reflink has none in a partition"},
    {{.type = "xfs", .reflink = true, .dax = true}, 6001, true, NULL, "before Linux 6.2"},
    {{.type = "xfs", .reflink = true, .dax = true}, 6012, true, "dax=always", NULL},
    {{.type = "btrfs", .dax = false, .partition = 2, .start = 4 * MIB}, 6012, true, NULL,
     "btrfs has none"},
};

static void what_is_used_and_said(void **state)
{
    struct place *place = *state;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dax dax =
            dax_choose(&place->arena, &cases[i].root, cases[i].version, cases[i].fs_dax, true);

        assert_int_equal(!dax.option, !cases[i].option);
        if (dax.option)
            assert_string_equal(dax.option, cases[i].option);
        assert_int_equal(!dax.why, !cases[i].why);
        if (dax.why)
            assert_non_null(strstr(dax.why, cases[i].why));
        assert_null(dax.cut);
    }
}

/* As growpart leaves it: the last sector is the 34th from the end of the disk. */
static void an_end_within_a_page(void **state)
{
    static const struct volume root = {.type = "ext4",
                                       .device = "pmem0p2",
                                       .partition = 2,
                                       .start = 4 * MIB,
                                       .size = UINT64_C(6279135) * 512,
                                       .dax = true,
                                       .cut = true};
    struct place *place = *state;
    struct dax dax = dax_choose(&place->arena, &root, 6001, true, true);

    assert_string_equal(dax.option, "dax=always");
    assert_null(dax.why);
    assert_string_equal(dax.cut, "pmem0 2 8192 6279135");
    dax = dax_choose(&place->arena, &root, 6001, true, false);
    assert_null(dax.option);
    assert_null(dax.cut);
    assert_non_null(strstr(dax.why, "does not end at a multiple of 4 KiB"));
}

static void of_an_unknown_root_nothing_is_said(void **state)
{
    struct place *place = *state;
    struct dax dax = dax_choose(&place->arena, NULL, 6001, true, true);

    assert_null(dax.option);
    assert_null(dax.why);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_used_and_said, place_setup, place_teardown),
        cmocka_unit_test_setup_teardown(an_end_within_a_page, place_setup, place_teardown),
        cmocka_unit_test_setup_teardown(of_an_unknown_root_nothing_is_said, place_setup,
                                        place_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
