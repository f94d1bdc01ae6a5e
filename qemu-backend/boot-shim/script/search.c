/* SPDX-License-Identifier: BSD-3-Clause */
/* "search" and "probe": which device is meant. */
#include "script/script.h"

#include <string.h>
#include <strings.h>

enum by { BY_FILE, BY_LABEL, BY_UUID };

struct wanted {
    enum by by;
    bool set;
    const char *variable, *name;
};

static bool is(const char *word, const char *name, const char *letter)
{
    return strcmp(word, name) == 0 || (letter && strcmp(word, letter) == 0);
}

/* search.fs_uuid NAME VARIABLE [HINT...] */
static bool read_short_form(size_t argc, char **argv, struct wanted *wanted)
{
    const char *kind = argv[0] + strlen("search.");

    if (argc < 2)
        return false;
    wanted->by = strcmp(kind, "file") == 0       ? BY_FILE
                 : strcmp(kind, "fs_label") == 0 ? BY_LABEL
                                                 : BY_UUID;
    wanted->name = argv[1];
    wanted->set = true;
    if (argc > 2)
        wanted->variable = argv[2];
    return true;
}

static bool read_options(size_t argc, char **argv, struct wanted *wanted)
{
    for (size_t i = 1; i < argc; i++) {
        const char *word = argv[i];

        if (is(word, "--file", "-f")) {
            wanted->by = BY_FILE;
        } else if (is(word, "--label", "-l") || is(word, "--fs-label", NULL)) {
            wanted->by = BY_LABEL;
        } else if (is(word, "--fs-uuid", "-u")) {
            wanted->by = BY_UUID;
        } else if (strncmp(word, "--set=", 6) == 0) {
            wanted->set = true;
            wanted->variable = word + 6;
        } else if (is(word, "--set", "-s")) {
            /* the variable may follow, and then what is looked for still has to */
            wanted->set = true;
            if (i + 2 < argc && argv[i + 1][0] != '-')
                wanted->variable = argv[++i];
        } else if (is(word, "--hint", "-h")) {
            i++;
        } else if (word[0] != '-') {
            if (!wanted->name)
                wanted->name = word;
        }
    }
    return wanted->name != NULL;
}

static bool matches(const struct volume *volume, const struct wanted *wanted)
{
    switch (wanted->by) {
    case BY_UUID: return *volume->uuid && strcasecmp(volume->uuid, wanted->name) == 0;
    case BY_LABEL: return *volume->label && strcmp(volume->label, wanted->name) == 0;
    default: return volume_has(volume, wanted->name, KIND_ANY);
    }
}

int script_search(struct script *script, size_t argc, char **argv)
{
    struct wanted wanted = {.by = BY_FILE, .variable = "root"};
    bool known = strncmp(argv[0], "search.", 7) == 0 ? read_short_form(argc, argv, &wanted)
                                                     : read_options(argc, argv, &wanted);

    if (!known)
        return 1;
    for (size_t i = 0; i < script->volumes->count; i++) {
        const struct volume *volume = &script->volumes->item[i];

        arena_step(script->arena);
        if (!matches(volume, &wanted))
            continue;
        if (wanted.set)
            script_set(script, wanted.variable, volume_grub_name(script->arena, volume));
        return 0;
    }
    return 1;
}

/* probe --set=VARIABLE --fs-uuid|--label|--fs DEVICE */
int script_probe(struct script *script, size_t argc, char **argv)
{
    const char *variable = NULL, *device = NULL, *rest, *value;
    const struct volume *volume;
    char what = '\0';

    for (size_t i = 1; i < argc; i++) {
        const char *word = argv[i];

        if (strncmp(word, "--set=", 6) == 0)
            variable = word + 6;
        else if (is(word, "--set", "-s") && i + 1 < argc)
            variable = argv[++i];
        else if (is(word, "--fs-uuid", "-u"))
            what = 'u';
        else if (is(word, "--label", "-l"))
            what = 'l';
        else if (is(word, "--fs", "-f"))
            what = 'f';
        else if (word[0] != '-')
            device = word;
    }
    if (!variable || !device || !what)
        return 1;
    /* with or without parentheses */
    volume = *device == '(' ? script_path(script, device, &rest)
                            : volumes_find(script->volumes, device, strlen(device));
    if (!volume)
        return 1;
    value = what == 'u' ? volume->uuid : what == 'l' ? volume->label : volume->type;
    script_set(script, variable, value);
    return 0;
}
