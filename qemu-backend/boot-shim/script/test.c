/* SPDX-License-Identifier: BSD-3-Clause */
/* "[" and "test" of GRUB's scripts. */
#include "script/script.h"

#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 32

struct test {
    struct script *script;
    char **argv;
    size_t at, argc;
    unsigned depth;
};

static bool test_or(struct test *test);

static bool take(struct test *test, const char *word)
{
    if (test->at == test->argc || strcmp(test->argv[test->at], word) != 0)
        return false;
    test->at++;
    return true;
}

/* Numbers of GRUB's -pgt and -plt come behind what both words begin with. */
static long after_prefix(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return strtol(a, NULL, 10);
}

/* Whether operation is one of two words; if so *result. */
static bool compare(const char *a, const char *operation, const char *b, bool *result)
{
    int order = strcmp(a, b);
    long x = strtol(a, NULL, 10), y = strtol(b, NULL, 10);
    const struct {
        const char *name;
        bool result;
    } known[] = {
        {"=", order == 0},
        {"==", order == 0},
        {"!=", order != 0},
        {"<", order < 0},
        {"<=", order <= 0},
        {">", order > 0},
        {">=", order >= 0},
        {"-eq", x == y},
        {"-ne", x != y},
        {"-lt", x < y},
        {"-le", x <= y},
        {"-gt", x > y},
        {"-ge", x >= y},
        {"-pgt", after_prefix(a, b) > after_prefix(b, a)},
        {"-plt", after_prefix(a, b) < after_prefix(b, a)},
    };

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, operation) == 0) {
            *result = known[i].result;
            return true;
        }
    }
    return false;
}

static bool test_file(struct script *script, char kind, const char *path)
{
    const char *rest;
    const struct volume *volume = script_path(script, path, &rest);

    if (!volume)
        return false;
    if (kind == 's')
        return volume_size(volume, rest) > 0;
    return volume_has(volume, rest,
                      kind == 'd'   ? KIND_DIRECTORY
                      : kind == 'f' ? KIND_FILE
                                    : KIND_ANY);
}

static bool test_unary(struct test *test, bool *result)
{
    const char *operation = test->argv[test->at], *word;

    if (operation[0] != '-' || !operation[1] || operation[2] || !strchr("zndefs", operation[1]))
        return false;
    if (test->argc - test->at < 2)
        return false;
    word = test->argv[test->at + 1];
    test->at += 2;
    if (operation[1] == 'z' || operation[1] == 'n')
        *result = (*word == '\0') == (operation[1] == 'z');
    else
        *result = test_file(test->script, operation[1], word);
    return true;
}

static bool test_primary(struct test *test)
{
    size_t left = test->argc - test->at;
    char **words = test->argv + test->at;
    bool result;

    if (!left)
        return false;
    if (left >= 3 && compare(words[0], words[1], words[2], &result)) {
        test->at += 3;
        return result;
    }
    if (take(test, "!"))
        return !test_primary(test);
    if (take(test, "(")) {
        if (++test->depth > DEPTH_MAX)
            longjmp(test->script->arena->out, 1);
        result = test_or(test);
        test->depth--;
        take(test, ")");
        return result;
    }
    if (test_unary(test, &result))
        return result;
    return *test->argv[test->at++] != '\0';
}

static bool test_and(struct test *test)
{
    bool result = test_primary(test);

    while (take(test, "-a")) {
        bool other = test_primary(test);

        result = result && other;
    }
    return result;
}

static bool test_or(struct test *test)
{
    bool result = test_and(test);

    while (take(test, "-o")) {
        bool other = test_and(test);

        result = result || other;
    }
    return result;
}

int script_test(struct script *script, size_t argc, char **argv)
{
    struct test test = {.script = script, .argv = argv, .at = 1, .argc = argc};

    if (strcmp(argv[0], "[") == 0) {
        if (strcmp(argv[argc - 1], "]") != 0)
            return 1;
        test.argc--;
    }
    if (test.argc <= test.at)
        return 1;
    return test_or(&test) ? 0 : 1;
}
