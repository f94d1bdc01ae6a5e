/* SPDX-License-Identifier: BSD-3-Clause */
/* Configurations that want no good: each ends in a second, in words or in an entry that boots. */
#include "place.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GRUB "/boot/grub/grub.cfg"
#define GOOD "menuentry good { linux /vmlinuz root=/dev/vda1\ninitrd /initrd }\n"
#define LOOP \
    "the boot configuration asks for more memory or time than one may: is there a loop in it?"
#define SECONDS_MAX 20

static struct volume *root_with(struct place *place, const char *text)
{
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_put(root, GRUB, text);
    place_kernel(root, "/vmlinuz", "/initrd");
    return root;
}

static int boot_in_time(struct place *place)
{
    time_t start = time(NULL);
    int result = place_boot(place);

    assert_in_range(time(NULL) - start, 0, SECONDS_MAX);
    return result;
}

/* Each for a fresh place. */
static void loops_end(void **state)
{
    static const char *const texts[] = {
        "while true; do true; done\n" GOOD,
        "until false; do set x=$x; done\n" GOOD,
        "function f { f; }\nf\n" GOOD,
        "function f { g; }\nfunction g { f; }\nf\n" GOOD,
        "source /boot/grub/grub.cfg\nwhile true; do true; done\n" GOOD,
        "set x=aaaaaaaaaaaaaaaa\nwhile true; do set x=$x$x; done\n" GOOD,
        "while true; do menuentry a { true; }; done\n" GOOD,
        "set n=0; while true; do increment n; set v$n=a; done\n" GOOD,
        "set n=0; while true; do search --file --set=x /nothing$n; done\n" GOOD,
        "while true; do save_env x; done\n" GOOD,
        "function f { eval f; }\nf; while true; do f; done\n" GOOD,
        "for a in 1 2 3 4 5 6 7 8 9; do for b in 1 2 3 4 5 6 7 8 9; do for c in 1 2 3 4 5 6 7 8 9; "
        "do for d in 1 2 3 4 5 6 7 8 9; do for e in 1 2 3 4 5 6 7 8 9; do for f in 1 2 3 4 5 6 7 8 "
        "9; do true; done; done; done; done; done; done\n" GOOD,
    };

    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct place *place;
        int result;

        place_teardown(state);
        place_setup(state);
        place = *state;
        root_with(place, texts[i]);
        result = boot_in_time(place);
        if (result != -E2BIG || strcmp(place->failure.text, LOOP) != 0)
            fail_msg("%s: %d %s", texts[i], result, place->failure.text);
    }
}

/* An entry that loops hurts when it is taken, and then in words. */
static void an_entry_that_loops_is_named(void **state)
{
    struct place *place = *state;

    root_with(place, "menuentry bad { while true; do true; done }\n" GOOD);
    assert_int_equal(boot_in_time(place), -E2BIG);
    assert_string_equal(place->failure.text,
                        "this entry asks for more memory or time than one may: "
                        "is there a loop in it?");
    assert_int_equal(place->menu.count, 2);
    /* The other one boots as if that had not been tried. */
    assert_int_equal(menu_choose(&place->menu, 1, &place->choice, &place->failure), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz");
}

/* So is one that ends in the midst of its calls. */
static void an_entry_that_calls_itself_is_left(void **state)
{
    struct place *place = *state;

    root_with(place, "function f { f; }\nmenuentry bad { f; }\n" GOOD);
    assert_int_equal(boot_in_time(place), -E2BIG);
    assert_int_equal(menu_choose(&place->menu, 1, &place->choice, &place->failure), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz");
}

/* A file that is its own source ends where GRUB's would; what stands behind is read. */
static void a_file_in_itself_ends(void **state)
{
    struct place *place = *state;

    root_with(place, "source /boot/grub/grub.cfg\n" GOOD);
    assert_int_equal(boot_in_time(place), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz");
}

static void repeated(struct place *place, const char *part, size_t times, const char *end)
{
    size_t length = strlen(part);
    char *text = malloc(times * length + strlen(end) + 1);

    assert_non_null(text);
    for (size_t i = 0; i < times; i++)
        memcpy(text + i * length, part, length);
    strcpy(text + times * length, end);
    root_with(place, text);
    free(text);
}

static void depth_ends(void **state)
{
    static const char *const parts[] = {
        "if ",
        "if true; then ",
        "while ",
        "menuentry a { ",
        "submenu a { ",
        "function f { ",
        "{ ",
        "! ",
        "\"",
        "'",
        "${",
        "((((",
        "[ ( ",
        "for x in a; do ",
        "$(",
        "`",
        "}",
        "\\",
        "fi ",
    };

    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        place_teardown(state);
        place_setup(state);
        repeated(*state, parts[i], 20000, "\n" GOOD);
        (void)boot_in_time(*state);
    }
}

static void conditions_end(void **state)
{
    struct place *place = *state;
    char text[20000] = "if [ ";

    for (unsigned i = 0; i < 900; i++)
        strcat(text, i % 2 ? "( " : "! ");
    strcat(text, "]; then true; fi\n" GOOD);
    root_with(place, text);
    assert_int_equal(boot_in_time(place), -E2BIG);
}

static void submenus_in_one_another_end(void **state)
{
    struct place *place = *state;

    /* each opens the next one; what is too deep is not shown */
    root_with(place, "function s { submenu deep { s; " GOOD " }\n}\ns\n");
    assert_int_equal(boot_in_time(place), 0);
    assert_string_equal(place->choice.kernel.path, "/vmlinuz");
}

static void size_ends(void **state)
{
    struct place *place = *state;

    repeated(place, "################################################################\n", 20000,
             GOOD);
    assert_int_equal(boot_in_time(place), -ENOENT);
    assert_string_equal(place->failure.text,
                        "no file system has a configuration of GRUB, systemd-boot or extlinux");
}

static void bytes_of_any_kind(void **state)
{
    static const char text[] = "set x=a\0b\nmenuentry \"\x1b[2J\xff\x01 bad\" { linux /vmlinuz "
                               "root=x\ninitrd /initrd }\n\0";
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_kernel(root, "/vmlinuz", "/initrd");
    place_put_bytes(root, GRUB, text, sizeof text);
    assert_int_equal(boot_in_time(place), 0);
    /* a console is not told what to do */
    assert_string_equal(place->choice.title, "?[2J?? bad");
}

/* Neither links nor dots lead out of a file system. */
static void paths_stay_inside(void **state)
{
    struct place *place = *state;
    struct volume *root = root_with(place, "menuentry a { linux /link/secret\ninitrd /initrd }\n"
                                           "menuentry b { linux /../secret\ninitrd /initrd }\n"
                                           "menuentry c { linux /absolute\ninitrd /initrd }\n");
    char outside[sizeof place->directory + 16];

    snprintf(outside, sizeof outside, "%s/secret", place->directory);
    place_put(root, "/inside", "a");
    assert_int_equal(symlinkat("../..", root->root, "link"), 0);
    assert_int_equal(symlinkat(outside, root->root, "absolute"), 0);
    assert_int_equal(link("/proc/self/exe", outside) == 0 || mkdir(outside, 0755) == 0, 1);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(boot_in_time(place), -ENOENT);
        assert_int_equal(menu_choose(&place->menu, i, &place->choice, &place->failure), -ENOENT);
    }
    rmdir(outside);
    unlink(outside);
}

/* Pipes and directories where files should be. */
static void files_that_are_none(void **state)
{
    struct place *place = *state;
    struct volume *root = root_with(place, "source /pipe\nload_env -f /pipe\n"
                                           "menuentry a { linux /pipe\ninitrd /initrd }\n");

    assert_int_equal(mkfifoat(root->root, "pipe", 0644), 0);
    assert_int_equal(boot_in_time(place), -ENOENT);
    assert_string_equal(place->failure.text,
                        "\"a\" names the kernel /pipe, which is not on pmem0p1");
}

static void extlinux_ends(void **state)
{
    struct place *place = *state;
    struct volume *root = place_volume(place, "ext4", ROOT_UUID, 1);

    place_put(root, "/extlinux.conf",
              "include extlinux.conf\nmenu include extlinux.conf\n"
              "label a\nlinux /vmlinuz\nappend initrd=/initrd x\n");
    place_kernel(root, "/vmlinuz", "/initrd");
    assert_int_equal(boot_in_time(place), 0);
    assert_string_equal(place->choice.options, "x");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, place_setup, place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(loops_end),
        CASE(an_entry_that_loops_is_named),
        CASE(an_entry_that_calls_itself_is_left),
        CASE(a_file_in_itself_ends),
        CASE(depth_ends),
        CASE(conditions_end),
        CASE(submenus_in_one_another_end),
        CASE(size_ends),
        CASE(bytes_of_any_kind),
        CASE(paths_stay_inside),
        CASE(files_that_are_none),
        CASE(extlinux_ends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
