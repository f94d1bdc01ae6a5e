/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Every image in golden/ still opens, reads, checks, repairs and can be written to as when it was
 * made. argv[1]: that folder.
 */
#include "golden.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

static const char *folder;

static int is_image(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);

    return length > 6 && strcmp(entry->d_name + length - 6, ".image") == 0;
}

static FILE *open_golden(const char *name, const char *suffix)
{
    char path[1024];
    FILE *file;

    snprintf(path, sizeof path, "%s/%s%s", folder, name, suffix);
    file = fopen(path, "r");
    if (!file)
        fail_msg("cannot open %s", path);
    return file;
}

static unsigned compare(const char *name)
{
    FILE *expected = open_golden(name, ".txt"), *found = tmpfile();
    char want[2048], have[2048];
    unsigned line = 0, failures = 0;

    assert_non_null(found);
    golden_describe(scratch_directory(), name, found);
    rewind(found);
    for (;;) {
        char *more_want = fgets(want, sizeof want, expected),
             *more_have = fgets(have, sizeof have, found);

        line++;
        if (!more_want && !more_have)
            break;
        if (!more_want || !more_have || strcmp(want, have)) {
            print_error("%s.txt line %u: expected %sfound    %s", name, line,
                        more_want ? want : "nothing\n", more_have ? have : "nothing\n");
            failures = 1;
            break;
        }
    }
    fclose(expected);
    fclose(found);
    return failures;
}

static void test_golden_images(void **state)
{
    struct dirent **list;
    int count = scandir(folder, &list, is_image, alphasort);
    unsigned failures = 0;

    (void)state;
    assert_true(count > 0);
    /* All of them first: some stand on others. */
    for (int i = 0; i < count; i++) {
        char path[1024];
        FILE *text;

        list[i]->d_name[strlen(list[i]->d_name) - 6] = 0;
        text = open_golden(list[i]->d_name, ".image");
        snprintf(path, sizeof path, "%s/%s.pcow", scratch_directory(), list[i]->d_name);
        golden_load(text, path);
        fclose(text);
    }
    for (int i = 0; i < count; i++) {
        failures += compare(list[i]->d_name);
        free(list[i]);
    }
    free(list);
    print_message("%d golden images\n", count);
    assert_int_equal(failures, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_golden_images, scratch_setup, scratch_teardown),
    };

    if (argc != 2)
        return 2;
    folder = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
