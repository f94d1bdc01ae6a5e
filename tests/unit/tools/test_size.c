/* SPDX-License-Identifier: BSD-3-Clause */
/* Sizes as people write them; the table is that of the Python parser too. */
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "options.h"
#include "size.h"

static const char *const verdicts[] = {
    [SIZE_NONE] = "not a size",
    [SIZE_SIGNED] = "signed",
    [SIZE_DECIMAL] = "decimal",
    [SIZE_TOO_LARGE] = "too large",
};

static void check(const char *text, const char *expected)
{
    char said[32];
    uint64_t size = 42;
    enum size_verdict verdict = parse_size(text, &size);

    if (verdict == SIZE_OK) {
        snprintf(said, sizeof(said), "%" PRIu64, size);
    } else {
        snprintf(said, sizeof(said), "%s", verdicts[verdict]);
        assert_int_equal(size, 42);
    }
    if (strcmp(said, expected)) {
        fail_msg("'%s' is '%s', and not '%s'", text, said, expected);
    }
}

static void test_table(void **state)
{
    FILE *table = fopen(getenv("PCOW_SIZES"), "re");
    char line[256];
    int rows = 0;

    (void)state;
    assert_non_null(table);
    while (fgets(line, sizeof(line), table)) {
        char *tab = strchr(line, '\t');

        if (*line == '#') {
            continue;
        }
        assert_non_null(tab);
        *tab = '\0';
        tab[1 + strcspn(tab + 1, "\n")] = '\0';
        check(line, tab + 1);
        rows++;
    }
    fclose(table);
    assert_true(rows > 80);
}

static void check_words(const char *text, const char *expected)
{
    struct pcow_error error;
    uint64_t size;

    assert_true(parse_size_of("image size", text, &size, &error) < 0);
    assert_string_equal(error.message, expected);
}

static void test_words(void **state)
{
    (void)state;
    check_words("lots", "image size 'lots' is not a size: write a number of bytes, or one with K, "
                        "M, G, T, P or E, which count in 1024");
    check_words("-5G", "image size '-5G' has a sign, which a size has not: write 5G");
    check_words("1.5 gb", "image size '1.5 gb' could count in 1000 or in 1024: write 1.5G or "
                          "1.5GiB, which count in 1024, or a number of bytes");
    check_words("8E", "image size '8E' is too large");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_words),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
