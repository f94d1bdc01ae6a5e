/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/extlinux.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

#define INCLUDES_MAX 16
#define LABELS_MAX 1024

struct label {
    const char *name, *title, *kernel, *initrd, *append;
    const struct volume *volume;
};

struct reader {
    struct menu *menu;
    const struct volume *volume;
    const char *directory; /* what paths without '/' begin in */
    const char *wanted; /* DEFAULT or ONTIMEOUT */
    const char *append; /* for labels without one */
    struct label *label; /* that is being read */
    struct label *menu_default;
    unsigned includes;
};

static void read_file(struct reader *reader, const char *path);

static const char *full_path(struct reader *reader, const char *path)
{
    if (*path == '/')
        return path;
    return arena_format(reader->menu->arena, "%s/%s", reader->directory, path);
}

static void begin_label(struct reader *reader, const char *name)
{
    struct arena *arena = reader->menu->arena;
    struct menu_item *item;

    if (reader->menu->count == LABELS_MAX)
        longjmp(arena->out, 1);
    reader->label = arena_alloc(arena, sizeof *reader->label);
    reader->label->name = name;
    reader->label->volume = reader->volume;
    item = menu_add(reader->menu);
    item->id = name;
    item->entry = reader->label;
}

static void read_menu_line(struct reader *reader, char *rest)
{
    size_t length = strcspn(rest, " \t");
    char *value = rest + length;

    value += strspn(value, " \t");
    if (length == 5 && strncasecmp(rest, "label", 5) == 0 && reader->label)
        reader->label->title = value;
    else if (length == 7 && strncasecmp(rest, "default", 7) == 0 && reader->label)
        reader->menu_default = reader->label;
    else if (length == 7 && strncasecmp(rest, "include", 7) == 0)
        read_file(reader, full_path(reader, value));
}

static void read_line(struct reader *reader, char *key, char *value)
{
    struct label *label = reader->label;

    if (strcasecmp(key, "label") == 0)
        begin_label(reader, value);
    else if (strcasecmp(key, "default") == 0 && !reader->wanted)
        reader->wanted = value;
    else if (strcasecmp(key, "ontimeout") == 0)
        reader->wanted = value;
    else if (strcasecmp(key, "include") == 0)
        read_file(reader, full_path(reader, value));
    else if (strcasecmp(key, "menu") == 0)
        read_menu_line(reader, value);
    else if ((strcasecmp(key, "linux") == 0 || strcasecmp(key, "kernel") == 0) && label)
        label->kernel = full_path(reader, value);
    else if (strcasecmp(key, "initrd") == 0 && label)
        label->initrd = value;
    else if (strcasecmp(key, "append") == 0 && label)
        label->append = value;
    else if (strcasecmp(key, "append") == 0)
        reader->append = value;
}

static void read_file(struct reader *reader, const char *path)
{
    size_t length;
    char *text, *line;

    if (reader->includes++ >= INCLUDES_MAX)
        return;
    text = volume_read(reader->menu->arena, reader->volume, path, CONFIG_MAX, &length);
    while (text && (line = strsep(&text, "\n"))) {
        char *value;

        arena_step(reader->menu->arena);
        line += strspn(line, " \t");
        for (length = strlen(line); length && strchr(" \t\r", line[length - 1]); length--)
            line[length - 1] = '\0';
        value = line + strcspn(line, " \t");
        if (!*line || *line == '#')
            continue;
        if (*value)
            *value++ = '\0';
        read_line(reader, line, value + strspn(value, " \t"));
    }
}

static void add_initrds(struct menu *menu, struct choice *choice, const struct volume *volume,
                        const char *directory, const char *paths)
{
    char *rest = arena_text(menu->arena, paths, strlen(paths)), *word;

    while ((word = strsep(&rest, ","))) {
        if (!*word || choice->initrds_count == INITRDS_MAX)
            continue;
        choice->initrds[choice->initrds_count++] = (struct boot_file){
            .volume = volume,
            .path = *word == '/' ? word : arena_format(menu->arena, "%s/%s", directory, word)};
    }
}

static int prepare(struct menu *menu, size_t item, struct choice *choice, struct failure *failure)
{
    const struct reader *reader = menu->loader;
    const struct label *label = menu->items[item].entry;
    const char *append = label->append ? label->append : reader->append;
    struct text options = {.arena = menu->arena};
    char *rest, *word;

    memset(choice, 0, sizeof *choice);
    choice->title = menu->items[item].title;
    choice->id = label->name;
    choice->options = "";
    if (label->kernel)
        choice->kernel = (struct boot_file){.volume = label->volume, .path = label->kernel};
    if (label->initrd)
        add_initrds(menu, choice, label->volume, reader->directory, label->initrd);
    rest =
        append && strcmp(append, "-") != 0 ? arena_text(menu->arena, append, strlen(append)) : NULL;
    while ((word = strsep(&rest, " \t"))) {
        if (strncmp(word, "initrd=", 7) == 0) {
            add_initrds(menu, choice, label->volume, reader->directory, word + 7);
        } else if (*word) {
            text_add_string(&options, options.length ? " " : "");
            text_add_string(&options, word);
        }
    }
    choice->options = text_string(&options);
    return menu_check(choice, failure);
}

int extlinux_read(struct menu *menu, const struct volume *volume, const char *path,
                  struct failure *failure)
{
    struct reader *reader = arena_alloc(menu->arena, sizeof *reader);

    reader->menu = menu;
    reader->volume = volume;
    reader->directory = arena_text(menu->arena, path, (size_t)(strrchr(path, '/') - path));
    read_file(reader, path);
    if (!menu->count)
        return fail_with(failure, -ENOEXEC, "%s of %s has no label", path, volume->device);
    menu->source = arena_format(menu->arena, "%s of %s (extlinux)", path, volume->device);
    menu->prepare = prepare;
    menu->loader = reader;
    for (size_t i = 0; i < menu->count; i++) {
        struct label *label = menu->items[i].entry;
        char *title = arena_format(menu->arena, "%s", label->title ? label->title : label->name);

        make_printable(title);
        menu->items[i].title = title;
        if (reader->wanted ? strcmp(label->name, reader->wanted) == 0
                           : label == reader->menu_default)
            menu->chosen = i;
    }
    return 0;
}
