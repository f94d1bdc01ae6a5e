/* SPDX-License-Identifier: BSD-3-Clause */
/* GRUB's script language: what a text does to the variable x. */
#include "place.h"

#include <string.h>

#include "script/script.h"

static const char *run(struct place *place, const char *text)
{
    struct script *script = arena_alloc(&place->arena, sizeof *script);

    script_open(script, &place->arena, &place->volumes);
    script_set(script, "root", "hd0,gpt1");
    script_run_text(script, text, strlen(text));
    return script_get(script, "x");
}

struct line {
    const char *text, *x;
};

static void check(struct place *place, const struct line *lines, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const char *x;

        if (setjmp(place->arena.out))
            fail_msg("%s: it left", lines[i].text);
        x = run(place, lines[i].text);
        if (strcmp(x, lines[i].x) != 0)
            fail_msg("%s: x is \"%s\" and not \"%s\"", lines[i].text, x, lines[i].x);
    }
}

static void words(void **state)
{
    static const struct line lines[] = {
        {"set x=a", "a"},
        {"x=a", "a"},
        {"set x='a b'", "a b"},
        {"set x=\"a b\"", "a b"},
        {"set x=a\\ b", "a b"},
        {"set y=b; set x=a$y", "ab"},
        {"set y=b; set x=a${y}c", "abc"},
        {"set y=b; set x='a$y'", "a$y"},
        {"set y=b; set x=\"a\\$y\"", "a$y"},
        {"set y=b; set x=\"a\"'$y'$y", "a$yb"},
        {"set y='b c'; set x=$y", "b"}, /* split, as GRUB does */
        {"set y='b c'; set x=\"$y\"", "b c"},
        {"set x=a # set x=b", "a"},
        {"set x=a#b", "a#b"},
        {"set x=a\\\nb", "ab"},
        {"set \\\nx=a", "a"},
        {"set x=\"a\\\nb\"", "ab"},
        {"set x=$", "$"},
        {"set x=${y", ""}, /* no word: a syntax error */
        {"set x=$nothing", ""},
        {"set x=a\r\n", "a"},
        {"set x=a; unset x", ""},
        {"set x=a;;\n;set x=b", "b"},
    };

    check(*state, lines, sizeof lines / sizeof *lines);
}

static void conditions(void **state)
{
    static const struct line lines[] = {
        {"if true; then set x=a; else set x=b; fi", "a"},
        {"if false; then set x=a; else set x=b; fi", "b"},
        {"if ! true; then set x=a; else set x=b; fi", "b"},
        {"if false; then set x=a; elif true; then set x=b; else set x=c; fi", "b"},
        {"if false; then set x=a; elif false; then set x=b; else set x=c; fi", "c"},
        {"if [ a = a ]\nthen\nset x=a\nfi", "a"},
        {"if [ x$y = x ] ; then set x=a; fi", "a"},
        {"if [ \"\" ]; then set x=a; else set x=b; fi", "b"},
        {"if [ ]; then set x=a; else set x=b; fi", "b"},
        {"if [ -n \"$y\" -a -z a ]; then set x=a; else set x=b; fi", "b"},
        {"if [ -z \"$y\" -o -z a ]; then set x=a; else set x=b; fi", "a"},
        {"if [ ! -z a ]; then set x=a; else set x=b; fi", "a"},
        {"if [ ( a = b -o b = b ) -a c = c ]; then set x=a; else set x=b; fi", "a"},
        {"if [ 2 -lt 10 ]; then set x=a; fi", "a"},
        {"if [ v9 -plt v10 ]; then set x=a; fi", "a"},
        {"if test 1 -eq 1; then set x=a; fi", "a"},
        {"if [ a = a; then set x=a; else set x=b; fi", "b"},
        {"if nothing_of_that_name; then set x=a; else set x=b; fi", "b"},
        {"if true; then if false; then set x=a; else set x=b; fi; fi", "b"},
        {"false; set x=$?", "1"},
    };

    check(*state, lines, sizeof lines / sizeof *lines);
}

static void loops_and_functions(void **state)
{
    static const struct line lines[] = {
        {"for y in a b c; do set x=$x$y; done", "abc"},
        {"for y in a b c; do if [ $y = b ]; then break; fi; set x=$x$y; done", "a"},
        {"for y in a b c; do if [ $y = b ]; then continue; fi; set x=$x$y; done", "ac"},
        {"set y=1; while [ $y -lt 4 ]; do set x=$x$y; increment y; done", "123"},
        {"set y=3; until [ $y -eq 0 ]; do set x=$x$y; decrement y; done", "321"},
        {"function f { set x=$1-$2-$#; }\nf a b", "a-b-2"},
        {"function f { set x=\"[$1]\"; }\nfunction g { f \"$@\"; }\ng 'a b'", "[a b]"},
        {"function f { set x=a; return; set x=b; }\nf", "a"},
        {"function f {\n  return 3\n}\nf\nset x=$?", "3"},
        {"function f { shift; set x=$1; }; f a b", "b"},
        {"function f { set x=a; }\nfunction f { set x=b; }\nf", "b"},
        {"eval set x=a", "a"},
        {"break; set x=a", "a"},
    };

    check(*state, lines, sizeof lines / sizeof *lines);
}

/* A line that cannot be read is left out, and what follows is not. */
static void errors(void **state)
{
    static const struct line lines[] = {
        {"set x=a\n}\nset x=b", "b"},
        {"set x=a\nif\nset x=$x-b\n", "a"},
        {"set x=a | set x=b\nset x=$x-c", "-c"},
        {"set x=a\nset y=b & set x=c\nset x=$x-d", "a-d"},
        {"set x=a\nset y='unfinished\nset x=b", "a"},
        {"set x=a\nfi\ndone\nthen\nset x=$x-b", "a-b"},
        {"function { set x=a; }\nset x=b", "b"},
    };

    check(*state, lines, sizeof lines / sizeof *lines);
}

static void devices(void **state)
{
    static const struct line lines[] = {
        {"search --no-floppy --fs-uuid --set=x 99999999-0000-0000-0000-000000000000", "hd0,gpt2"},
        {"search --fs-uuid --set=x --hint-bios=hd9,gpt9 ABCD-1234", "hd0,gpt1"},
        {"search --fs-uuid --set=x abcd-1234", "hd0,gpt1"},
        {"search -u -s x ABCD-1234", "hd0,gpt1"},
        {"search --set=x --label data", "hd0,gpt2"},
        {"search --file --set=x /only/there", "hd0,gpt2"},
        {"search.fs_uuid ABCD-1234 x hd0,gpt7", "hd0,gpt1"},
        {"search.file /only/there x", "hd0,gpt2"},
        {"search.fs_label data x", "hd0,gpt2"},
        {"set x=a; search --fs-uuid --set=x 0000-0000", "a"},
        {"if search --fs-uuid --set=y 0000-0000; then set x=a; else set x=b; fi", "b"},
        {"if [ -f (hd0,gpt2)/only/there ]; then set x=a; fi", "a"},
        {"if [ -f (hd0,2)/only/there ]; then set x=a; fi", "a"},
        {"if [ -f (hd0,msdos2)/only/there ]; then set x=a; fi", "a"},
        {"if [ -d (hd0,gpt2)/only ]; then set x=a; fi", "a"},
        {"if [ -f (hd0,gpt2)/only ]; then set x=a; else set x=b; fi", "b"},
        {"if [ -s (hd0,gpt2)/empty ]; then set x=a; else set x=b; fi", "b"},
        {"if [ -e /only/there ]; then set x=a; else set x=b; fi", "b"},
        {"set root='hd0,gpt2'\nif [ -e /only/there ]; then set x=a; fi", "a"},
        {"if [ -e (hd7)/x -o -e (hd0 ]; then set x=a; else set x=b; fi", "b"},
        {"probe --set=x -u (hd0,gpt1)", "ABCD-1234"},
        {"probe --set=x --fs hd0,gpt2", "ext4"},
        {"source (hd0,gpt2)/script", "sourced"},
        {"configfile (hd0,gpt2)/script", "sourced"},
        {"if source (hd0,gpt2)/none; then set x=a; else set x=b; fi", "b"},
    };
    struct place *place = *state;
    struct volume *volume;

    place_volume(place, "vfat", "ABCD-1234", 1);
    volume = place_volume(place, "ext4", "99999999-0000-0000-0000-000000000000", 2);
    strcpy(volume->label, "data");
    place_put(volume, "/only/there", "a");
    place_put(volume, "/empty", "");
    place_put(volume, "/script", "set x=sourced\n");
    check(place, lines, sizeof lines / sizeof *lines);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, place_setup, place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(words), CASE(conditions), CASE(loops_and_functions), CASE(errors), CASE(devices),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
