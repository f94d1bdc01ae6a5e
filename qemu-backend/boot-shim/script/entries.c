/* SPDX-License-Identifier: BSD-3-Clause */
/* What makes the menu, and what an entry of it says to boot. */
#include "script/script.h"

#include <errno.h>
#include <string.h>

#define ENTRIES_MAX 4096

static struct script_entry *add_entry(struct script *script)
{
    struct script_entry *entry = arena_alloc(script->arena, sizeof *entry);

    if (++script->entries_count > ENTRIES_MAX)
        longjmp(script->arena->out, 1);
    *script->last_entry = entry;
    script->last_entry = &entry->next;
    return entry;
}

/*
 * menuentry TITLE [--class C] [--users U] [--hotkey K] [--id ID] [--unrestricted] [ARGUMENT...] { }
 */
int script_menuentry(struct script *script, size_t argc, char **argv, const struct node *node)
{
    struct script_entry *entry;
    bool submenu = strcmp(argv[0], "submenu") == 0;
    const char *title = NULL, *id = NULL;
    size_t count = 0;

    for (size_t i = 1; i < argc; i++) {
        bool more = i + 1 < argc;

        if (strcmp(argv[i], "--id") == 0 && more)
            id = argv[++i];
        else if (strncmp(argv[i], "--id=", 5) == 0)
            id = argv[i] + 5;
        else if (strcmp(argv[i], "--class") == 0 || strcmp(argv[i], "--users") == 0
                 || strcmp(argv[i], "--hotkey") == 0 || strcmp(argv[i], "--source") == 0)
            i++;
        else if (strncmp(argv[i], "--", 2) != 0) {
            title = title ? title : argv[i];
            argv[count++] = argv[i];
        }
    }
    if (!title || !node->has_block)
        return 1;
    entry = add_entry(script);
    entry->title = title;
    entry->id = id ? id : title;
    entry->block = node->block;
    entry->submenu = submenu;
    entry->argc = count;
    entry->argv = argv;
    return 0;
}

/* Fedora's command: entries of the Boot Loader Specification, the newest first. */
int script_blscfg(struct script *script)
{
    const char *name = script_get(script, "boot"), *directory = script_get(script, "blsdir");
    const struct volume *volume;
    struct bls_entry *entries;
    size_t count;

    if (!*name)
        name = script_get(script, "root");
    volume = volumes_find(script->volumes, name, strlen(name));
    if (!volume)
        return 1;
    if (!*directory)
        directory = volume_has(volume, "/loader/entries", KIND_DIRECTORY) ? "/loader/entries"
                                                                          : "/boot/loader/entries";
    count = bls_read(script->arena, volume, directory, &entries);
    /* it looks at nothing but the names */
    for (size_t i = 0; i < count; i++) {
        entries[i].sort_key = NULL;
        entries[i].exhausted = false;
    }
    bls_sort(entries, count);
    for (size_t i = 0; i < count; i++) {
        struct script_entry *entry = add_entry(script);

        entry->title = entries[i].title ? entries[i].title : entries[i].id;
        entry->id = entries[i].id;
        entry->bls = &entries[i];
    }
    return count ? 0 : 1;
}

/* ---- while an entry runs */

static bool set_file(struct script *script, const char *path, struct boot_file *file)
{
    const char *rest;
    const struct volume *volume = script_path(script, path, &rest);

    if (!volume) {
        fail_with(script->failure, -ENODEV,
                  "\"%s\" names %s, and there is no such device (root is %s)",
                  script->choice->title, path, script_get(script, "root"));
        return false;
    }
    *file =
        (struct boot_file){.volume = volume, .path = arena_text(script->arena, rest, strlen(rest))};
    return true;
}

/* An argument of the command line, quoted as the kernel reads it. */
static void add_argument(struct text *text, const char *word)
{
    bool quote = strchr(word, ' ') != NULL;
    const char *equals = strchr(word, '=');

    if (text->length)
        text_add(text, " ", 1);
    if (quote && equals && !strchr(word, '"')) {
        text_add(text, word, (size_t)(equals + 1 - word));
        word = equals + 1;
    }
    quote = quote && !strchr(word, '"');
    if (quote)
        text_add(text, "\"", 1);
    text_add_string(text, word);
    if (quote)
        text_add(text, "\"", 1);
}

int script_linux(struct script *script, size_t argc, char **argv)
{
    struct text options = {.arena = script->arena};
    struct choice *choice = script->choice;

    if (!choice || argc < 2 || !set_file(script, argv[1], &choice->kernel))
        return 1;
    for (size_t i = 2; i < argc; i++)
        add_argument(&options, argv[i]);
    choice->options = text_string(&options);
    choice->initrds_count = 0;
    return volume_has(choice->kernel.volume, choice->kernel.path, KIND_FILE) ? 0 : 1;
}

int script_initrd(struct script *script, size_t argc, char **argv)
{
    struct choice *choice = script->choice;

    if (!choice || argc < 2)
        return 1;
    choice->initrds_count = 0;
    for (size_t i = 1; i < argc; i++) {
        const char *path = argv[i];

        if (strncmp(path, "newc:", 5) == 0) /* newc:NAME:PATH makes an archive of it */
            return 1;
        if (choice->initrds_count == INITRDS_MAX
            || !set_file(script, path, &choice->initrds[choice->initrds_count]))
            return 1;
        choice->initrds_count++;
    }
    return 0;
}
