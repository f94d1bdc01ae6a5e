/* SPDX-License-Identifier: BSD-3-Clause */
/* The word that was probably meant. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "util/nearest.h"

static const char *const words[] = {"check", "convert", "create", "info",   "measure",
                                    "map",   "rebase",  "resize", "seal",   "snapshot"};

static void check(const char *word, const char *expected)
{
    struct nearest nearest;

    nearest_begin(&nearest, word);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        nearest_look(&nearest, words[i]);
    if (!expected)
        assert_null(nearest.found);
    else if (!nearest.found)
        fail_msg("'%s' is near to nothing, and not to '%s'", word, expected);
    else
        assert_string_equal(nearest.found, expected);
}

static void test_near(void **state)
{
    (void)state;
    check("chek", "check");
    check("chekc", "check");
    check("covnert", "convert");
    check("cretae", "create");
    check("inof", "info");
    check("mpa", "map");
    check("snapshots", "snapshot");
    check("Check", "check");
    check("check", "check");
}

static void test_far(void **state)
{
    (void)state;
    check("", NULL);
    check("x", NULL);
    check("delete", NULL);
    check("frobnicate", NULL);
    check("maps!!", NULL);
}

/* Longer than any name is: nothing is near, and nothing is written beyond an array. */
static void test_long(void **state)
{
    char longest[NEAREST_MAX_LENGTH + 2], hint[NEAREST_HINT_SIZE];
    struct nearest nearest;

    (void)state;
    memset(longest, 'x', sizeof longest);
    longest[NEAREST_MAX_LENGTH + 1] = '\0';
    nearest_begin(&nearest, longest);
    nearest_look(&nearest, longest);
    assert_null(nearest.found);
    assert_string_equal(nearest_hint(&nearest, hint), "");
    longest[NEAREST_MAX_LENGTH] = '\0';
    nearest_begin(&nearest, longest + 1);
    nearest_look(&nearest, longest);
    assert_ptr_equal(nearest.found, longest);
    nearest_hint(&nearest, hint);
    assert_int_equal(strlen(hint), strlen(": did you mean ''?") + NEAREST_MAX_LENGTH);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_near),
        cmocka_unit_test(test_far),
        cmocka_unit_test(test_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
