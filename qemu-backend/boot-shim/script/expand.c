/* SPDX-License-Identifier: BSD-3-Clause */
/* Words of a command: variables, and what they are split into. */
#include "script/script.h"

#include <string.h>

#define WORDS_MAX 1024

struct words {
    struct script *script;
    char **argv;
    size_t count, room;
    struct text text; /* of the word that is being put together */
    bool any;
};

static void end_word(struct words *words)
{
    if (!words->any)
        return;
    if (words->count == words->room) {
        size_t room = (words->room + 4) * 2;
        char **larger;

        if (room > WORDS_MAX * 4)
            longjmp(words->script->arena->out, 1);
        larger = arena_alloc(words->script->arena, room * sizeof *larger);
        if (words->count)
            memcpy(larger, words->argv, words->count * sizeof *larger);
        words->argv = larger;
        words->room = room;
    }
    words->argv[words->count++] =
        arena_text(words->script->arena, text_string(&words->text), words->text.length);
    words->text = (struct text){.arena = words->script->arena};
    words->any = false;
}

static void add_value(struct words *words, const char *value, bool quoted)
{
    if (quoted) {
        text_add_string(&words->text, value);
        words->any = true;
        return;
    }
    while (*value) {
        size_t blank = strspn(value, " \t\n"), length;

        if (blank)
            end_word(words);
        value += blank;
        length = strcspn(value, " \t\n");
        if (length) {
            text_add(&words->text, value, length);
            words->any = true;
        }
        value += length;
    }
}

static void add_arguments(struct words *words, const struct script *script, bool one)
{
    for (size_t i = 0; i < script->argc; i++) {
        if (i && one)
            text_add_string(&words->text, " ");
        else if (i)
            end_word(words);
        add_value(words, script->argv[i], true);
    }
}

static void add_variable(struct words *words, const struct part *part)
{
    struct script *script = words->script;
    const char *name = part->text;

    if (strcmp(name, "@") == 0 || strcmp(name, "*") == 0) {
        add_arguments(words, script, *name == '*' && part->quoted);
    } else if (strcmp(name, "#") == 0) {
        add_value(words, arena_format(script->arena, "%zu", script->argc), true);
    } else if (strcmp(name, "?") == 0) {
        add_value(words, arena_format(script->arena, "%d", script->status), true);
    } else if (*name >= '0' && *name <= '9') {
        size_t number = 0;

        while (*name >= '0' && *name <= '9' && number < WORDS_MAX)
            number = number * 10 + (size_t)(*name++ - '0');
        add_value(words, number && number <= script->argc ? script->argv[number - 1] : "",
                  part->quoted);
    } else {
        add_value(words, script_get(script, name), part->quoted);
    }
}

size_t script_expand(struct script *script, const struct word *list, char ***argv)
{
    struct words words = {.script = script, .text = {.arena = script->arena}};

    for (; list; list = list->next) {
        for (const struct part *part = list->parts; part; part = part->next) {
            if (part->variable)
                add_variable(&words, part);
            else
                add_value(&words, part->text, true);
        }
        end_word(&words);
    }
    *argv = words.argv;
    return words.count;
}
