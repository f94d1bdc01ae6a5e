/* SPDX-License-Identifier: BSD-3-Clause */
/* load_env and save_env. */
#include "script/script.h"

#include <string.h>

#include "config/grubenv.h"

struct loading {
    struct script *script;
    char **names; /* only these; all if there is none */
    size_t count;
};

/* Take -f FILE and the other options out of the words. */
static const char *read_options(struct script *script, size_t *argc, char **argv)
{
    const char *path = NULL;
    size_t count = 0;

    for (size_t i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "-f") == 0 || strcmp(argv[i], "--file") == 0) {
            if (i + 1 < *argc)
                path = argv[++i];
        } else if (strncmp(argv[i], "--file=", 7) == 0) {
            path = argv[i] + 7;
        } else if (argv[i][0] != '-') {
            argv[count++] = argv[i];
        }
    }
    *argc = count;
    return path ? path : arena_format(script->arena, "%s/grubenv", script_get(script, "prefix"));
}

static void load(void *context, const char *name, const char *value)
{
    struct loading *loading = context;
    bool wanted = !loading->count;

    for (size_t i = 0; i < loading->count && !wanted; i++)
        wanted = strcmp(loading->names[i], name) == 0;
    if (wanted)
        script_set(loading->script, name, value);
}

int script_load_env(struct script *script, size_t argc, char **argv)
{
    const char *path = read_options(script, &argc, argv), *rest;
    const struct volume *volume = script_path(script, path, &rest);
    struct loading loading = {.script = script, .names = argv, .count = argc};
    size_t length;
    char *data;

    if (!volume)
        return 1;
    data = volume_read(script->arena, volume, rest, GRUBENV_MAX, &length);
    return data && grubenv_read(script->arena, data, length, load, &loading) ? 0 : 1;
}

int script_save_env(struct script *script, size_t argc, char **argv)
{
    const char *path = read_options(script, &argc, argv), *rest;
    const struct volume *volume = script_path(script, path, &rest);

    if (!volume || !volume_has(volume, rest, KIND_FILE))
        return 1;
    for (size_t i = 0; i < argc; i++) {
        struct save **last = &script->saves, *save;
        const char *value = script_find(script, argv[i]);

        while (*last
               && (strcmp((*last)->name, argv[i]) != 0 || (*last)->volume != volume
                   || strcmp((*last)->path, rest) != 0))
            last = &(*last)->next;
        if (!*last) {
            if (script->saves_count >= SAVES_MAX)
                return 1;
            script->saves_count++;
            save = arena_alloc(script->arena, sizeof *save);
            save->volume = volume;
            save->path = arena_text(script->arena, rest, strlen(rest));
            save->name = argv[i];
            *last = save;
        }
        (*last)->value = value ? arena_text(script->arena, value, strlen(value)) : NULL;
    }
    return 0;
}
