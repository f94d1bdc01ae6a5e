/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/loader.h"

#include <errno.h>
#include <string.h>

#include "config/bls.h"
#include "config/uki.h"

#define CONF "/loader/loader.conf"
#define IMAGES "/EFI/Linux"

struct entries {
    struct arena *arena;
    struct bls_entry *item;
    size_t count, room;
};

static struct bls_entry *add(struct entries *entries)
{
    if (entries->count == entries->room) {
        size_t room = (entries->room + 8) * 2;
        struct bls_entry *larger = arena_alloc(entries->arena, room * sizeof *larger);

        if (entries->count)
            memcpy(larger, entries->item, entries->count * sizeof *larger);
        entries->item = larger;
        entries->room = room;
    }
    return &entries->item[entries->count++];
}

/* A value of an os-release file, without quotes; NULL if it is not there. */
static const char *os_release(struct arena *arena, const char *text, const char *key)
{
    size_t length = strlen(key);

    while (*text) {
        size_t line = strcspn(text, "\n");

        arena_step(arena);
        if (line > length && memcmp(text, key, length) == 0 && text[length] == '=') {
            const char *value = text + length + 1;
            size_t size = line - length - 1;

            if (size >= 2 && (*value == '"' || *value == '\'') && value[size - 1] == *value) {
                value++;
                size -= 2;
            }
            return arena_text(arena, value, size);
        }
        text += line + (text[line] != '\0');
    }
    return NULL;
}

static const char *first_of(struct arena *arena, const char *text, const char *const *keys)
{
    const char *value = NULL;

    for (; *keys && !value; keys++)
        value = os_release(arena, text, *keys);
    return value;
}

static void add_image(struct entries *entries, const struct volume *volume, const char *name)
{
    static const char *const titles[] = {"PRETTY_NAME", "IMAGE_ID", "NAME", "ID", NULL};
    static const char *const keys[] = {"IMAGE_ID", "ID", NULL};
    static const char *const versions[] = {"IMAGE_VERSION", "VERSION", "VERSION_ID", "BUILD_ID",
                                           NULL};
    struct arena *arena = entries->arena;
    const char *path = arena_format(arena, IMAGES "/%s", name), *text;
    struct bls_entry *entry;
    struct uki uki;

    if (!uki_read(volume, path, &uki))
        return;
    text = uki_text(arena, volume, path, &uki.osrel);
    entry = add(entries);
    memset(entry, 0, sizeof *entry);
    entry->volume = volume;
    entry->id = bls_name(arena, name, ".efi", &entry->exhausted);
    entry->title = first_of(arena, text, titles);
    entry->sort_key = first_of(arena, text, keys);
    entry->version = first_of(arena, text, versions);
    entry->efi = path;
}

static void add_volume(struct entries *entries, const struct volume *volume)
{
    struct bls_entry *found;
    size_t count = bls_read(entries->arena, volume, "/loader/entries", &found);
    char **names;

    for (size_t i = 0; i < count; i++)
        *add(entries) = found[i];
    count = volume_list(entries->arena, volume, IMAGES, ".efi", &names);
    for (size_t i = 0; i < count; i++)
        add_image(entries, volume, names[i]);
}

bool loader_matches(const char *pattern, const char *name)
{
    const char *star = NULL, *again = NULL;

    while (*name) {
        if (*pattern == '*') {
            star = pattern++;
            again = name;
        } else if (*pattern == '?' || *pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star + 1;
            name = ++again;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

/* The word behind "default" in loader.conf. */
static const char *read_default(struct menu *menu)
{
    for (size_t i = 0; i < menu->volumes->count; i++) {
        size_t length;
        char *text = volume_read(menu->arena, &menu->volumes->item[i], CONF, CONFIG_MAX, &length);
        char *line;

        while (text && (line = strsep(&text, "\n"))) {
            line += strspn(line, " \t");
            if (strncmp(line, "default", 7) != 0 || !line[7] || !strchr(" \t", line[7]))
                continue;
            line += 7 + strspn(line + 7, " \t");
            line[strcspn(line, " \t\r")] = '\0';
            return line;
        }
    }
    return NULL;
}

static int prepare(struct menu *menu, size_t item, struct choice *choice, struct failure *failure)
{
    const struct bls_entry *entry = menu->items[item].entry;
    struct boot_file file = {.volume = entry->volume, .path = entry->efi};
    struct uki uki;

    memset(choice, 0, sizeof *choice);
    choice->title = menu->items[item].title;
    choice->id = entry->id;
    choice->options = entry->options ? entry->options : "";
    if (entry->kernel) {
        choice->kernel = (struct boot_file){.volume = entry->volume, .path = entry->kernel};
        for (size_t i = 0; i < entry->initrds_count; i++)
            choice->initrds[choice->initrds_count++] =
                (struct boot_file){.volume = entry->volume, .path = entry->initrds[i]};
        return menu_check(choice, failure);
    }
    if (!uki_read(entry->volume, entry->efi, &uki))
        return fail_with(failure, -ENOEXEC,
                         "\"%s\" starts the EFI program %s, which is no unified "
                         "kernel image",
                         choice->title, entry->efi);
    file.offset = uki.kernel.offset;
    file.size = uki.kernel.size;
    choice->kernel = file;
    for (size_t i = 0; i < 2; i++) {
        const struct uki_section *section = i ? &uki.initrd : &uki.ucode;

        file.offset = section->offset;
        file.size = section->size;
        if (section->size)
            choice->initrds[choice->initrds_count++] = file;
    }
    if (uki.cmdline.size)
        choice->options = uki_text(menu->arena, entry->volume, entry->efi, &uki.cmdline);
    return menu_check(choice, failure);
}

bool loader_installed(const struct volumes *volumes)
{
    for (size_t i = 0; i < volumes->count; i++) {
        const struct volume *volume = &volumes->item[i];

        if (strcmp(volume->type, "vfat") == 0
            && volume_has(volume, "/EFI/systemd/systemd-bootx64.efi", KIND_FILE))
            return true;
    }
    return false;
}

int loader_read(struct menu *menu, struct failure *failure)
{
    struct entries entries = {.arena = menu->arena};
    const char *wanted;

    for (size_t i = 0; i < menu->volumes->count; i++)
        add_volume(&entries, &menu->volumes->item[i]);
    if (!entries.count)
        return fail_with(failure, -ENOENT, "no file system has /loader/entries or " IMAGES);
    bls_sort(entries.item, entries.count);
    wanted = read_default(menu);
    menu->source = arena_format(menu->arena, "/loader/entries and " IMAGES " of %s (systemd-boot)",
                                entries.item[0].volume->device);
    menu->prepare = prepare;
    menu->chosen = entries.count;
    for (size_t i = 0; i < entries.count; i++) {
        struct bls_entry *entry = &entries.item[i];
        struct menu_item *item = menu_add(menu);
        char *title = arena_format(menu->arena, "%s", entry->title ? entry->title : entry->id);

        make_printable(title);
        item->title = title;
        item->id = entry->id;
        item->entry = entry;
        if (menu->chosen == entries.count && wanted
            && (loader_matches(wanted, entry->id)
                || loader_matches(wanted, arena_format(menu->arena, "%s%s", entry->id,
                                                       entry->kernel ? ".conf" : ".efi"))))
            menu->chosen = i;
    }
    if (menu->chosen == entries.count)
        menu->chosen = 0;
    return 0;
}
