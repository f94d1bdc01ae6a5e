/* SPDX-License-Identifier: BSD-3-Clause */
/* The menu of a grub.cfg, what of it is chosen, and what that boots. */
#include "script/grub.h"

#include <errno.h>
#include <string.h>

#include "script/script.h"

static char *clean(struct arena *arena, const char *text)
{
    char *copy = arena_text(arena, text, strlen(text));

    make_printable(copy);
    return copy;
}

/* Run what stands in an entry's braces, with its arguments. */
static void run_entry(struct script *script, const struct script_entry *entry)
{
    size_t argc = script->argc;
    char **argv = script->argv;

    script->argc = entry->argc;
    script->argv = entry->argv;
    script_run(script, entry->block);
    script->flow = FLOW_ON;
    script->argc = argc;
    script->argv = argv;
}

/* The entries of a submenu, made by running it. */
static struct script_entry *open_submenu(struct script *script, struct script_entry *submenu)
{
    struct script_entry *entries = script->entries, **last = script->last_entry, *found;

    script->entries = NULL;
    script->last_entry = &script->entries;
    run_entry(script, submenu);
    found = script->entries;
    script->entries = entries;
    script->last_entry = last;
    for (struct script_entry *entry = found; entry; entry = entry->next)
        entry->parent = submenu;
    return found;
}

/* All the entries, those of submenus in their places: "Advanced options>Debian, with Linux 6.1". */
static void add_items(struct menu *menu, struct script *script, struct script_entry *entry,
                      const char *before, unsigned depth)
{
    for (; entry; entry = entry->next) {
        const char *title =
            arena_format(menu->arena, "%s%s", before, clean(menu->arena, entry->title));
        struct menu_item *item;

        if (entry->submenu) {
            if (depth == SUBMENUS_MAX)
                continue;
            entry->children = open_submenu(script, entry);
            add_items(menu, script, entry->children, arena_format(menu->arena, "%s>", title),
                      depth + 1);
            continue;
        }
        item = menu_add(menu);
        item->title = title;
        item->id = entry->id;
        item->entry = entry;
    }
}

/* ---- what is booted */

static const char *expand_text(struct script *script, const char *value)
{
    /* as a word in double quotes, in which nothing but variables means anything */
    struct text text = {.arena = script->arena};

    while (*value) {
        const char *name = value + 1, *end;
        bool braces = *name == '{';
        size_t length;

        if (*value != '$') {
            text_add(&text, value++, 1);
            continue;
        }
        name += braces;
        length = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
        end = name + length;
        if (!length || (braces && *end != '}')) {
            text_add(&text, value++, 1);
            continue;
        }
        text_add_string(&text, script_get(script, arena_text(script->arena, name, length)));
        value = end + braces;
    }
    return text_string(&text);
}

static void boot_bls(struct script *script, const struct bls_entry *bls, struct choice *choice)
{
    const char *options = bls->options ? bls->options : script_get(script, "default_kernelopts");

    choice->kernel = (struct boot_file){.volume = bls->volume, .path = bls->kernel};
    for (size_t i = 0; i < bls->initrds_count; i++) {
        const char *path = expand_text(script, bls->initrds[i]);

        /* "$tuned_initrd" and the like, mostly empty */
        if (*path && choice->initrds_count < INITRDS_MAX)
            choice->initrds[choice->initrds_count++] =
                (struct boot_file){.volume = bls->volume, .path = path};
    }
    choice->options = expand_text(script, options);
}

static void run_chosen(struct script *script, struct script_entry *entry, struct choice *choice)
{
    struct script_entry *parents[SUBMENUS_MAX + 1];
    struct text chosen = {.arena = script->arena};
    size_t count = 0;

    for (struct script_entry *at = entry->parent; at && count <= SUBMENUS_MAX; at = at->parent)
        parents[count++] = at;
    while (count) {
        open_submenu(script, parents[--count]);
        text_add_string(&chosen, parents[count]->id);
        text_add_string(&chosen, ">");
    }
    text_add_string(&chosen, entry->id);
    script_set(script, "chosen", text_string(&chosen));
    script->choice = choice;
    if (entry->bls)
        boot_bls(script, entry->bls, choice);
    else
        run_entry(script, entry);
    script->choice = NULL;
}

static int prepare(struct menu *menu, size_t item, struct choice *choice, struct failure *failure)
{
    struct script *script = menu->loader;
    struct script_entry *entry = menu->items[item].entry;
    static const char *const attempts[] = {NULL, "initrdfail"};

    /* An entry before this one may have ended in the midst. */
    script->depth = script->loops = script->sources = 0;
    script->flow = FLOW_ON;
    script->choice = NULL;
    for (size_t i = 0; i < sizeof attempts / sizeof *attempts; i++) {
        memset(choice, 0, sizeof *choice);
        choice->title = menu->items[item].title;
        choice->id = entry->id;
        choice->options = "";
        script->foreign = NULL;
        script->failure = failure;
        failure->text[0] = '\0';
        if (attempts[i])
            script_set(script, attempts[i], "1");
        run_chosen(script, entry, choice);
        /* Ubuntu's cloud images try without their initrd first, which has the drivers */
        if (choice->initrds_count)
            break;
    }
    menu->saves = script->saves;
    if (script->foreign)
        return fail_with(failure, -ENOEXEC, "\"%s\" runs \"%s\", which this boot shim cannot",
                         choice->title, script->foreign);
    if (!choice->kernel.path && failure->text[0])
        return -ENODEV;
    return menu_check(choice, failure);
}

static void set_up(struct script *script, const struct volume *volume, const char *path)
{
    static const char *const features[] = {
        "feature_menuentry_id",
        "feature_menuentry_options",
        "feature_timeout_style",
        "feature_default_font_path",
        "feature_platform_search_hint",
        "feature_all_video_module",
        "feature_ntldr",
        "feature_200_final",
        "feature_chainloader_bpb",
        "feature_nativedisk_cmd",
    };
    struct arena *arena = script->arena;
    const char *root = volume_grub_name(arena, volume);
    const char *directory =
        arena_format(arena, "(%s)%.*s", root, (int)(strrchr(path, '/') - path), path);

    for (size_t i = 0; i < sizeof features / sizeof *features; i++)
        script_set(script, features[i], "y");
    script_set(script, "root", root);
    script_set(script, "prefix", directory);
    script_set(script, "config_directory", directory);
    script_set(script, "config_file", arena_format(arena, "(%s)%s", root, path));
    script_set(script, "cmdpath", directory);
    script_set(script, "grub_platform", "pc");
    script_set(script, "grub_cpu", "i386");
}

int grub_read(struct menu *menu, const struct volume *volume, const char *path,
              struct failure *failure)
{
    struct script *script = arena_alloc(menu->arena, sizeof *script);
    const struct menu_item *found;
    size_t length;
    char *text;

    script_open(script, menu->arena, menu->volumes);
    set_up(script, volume, path);
    text = volume_read(menu->arena, volume, path, CONFIG_MAX, &length);
    if (!text)
        return fail_with(failure, -ENOENT, "%s of %s cannot be read", path, volume->device);
    script_run_text(script, text, length);
    script->flow = FLOW_ON;
    menu->source = arena_format(menu->arena, "%s of %s (GRUB)", path, volume->device);
    menu->prepare = prepare;
    menu->loader = script;
    menu->locked = *script_get(script, "superusers") != '\0';
    add_items(menu, script, script->entries, "", 0);
    menu->saves = script->saves;
    if (!menu->count)
        return fail_with(failure, -ENOEXEC, "%s of %s has no entry that boots", path,
                         volume->device);
    found = script_default(script, menu, script_get(script, "default"));
    menu->chosen = found ? (size_t)(found - menu->items) : 0;
    return 0;
}
