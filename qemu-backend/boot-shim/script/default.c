/* SPDX-License-Identifier: BSD-3-Clause */
/* Which entry the variable "default" means: "0", "1>2", "ID", "Title>Title". */
#include "script/script.h"

#include <stdlib.h>
#include <string.h>

/* The first part of a default, up to '>' (">>" is '>'); *rest is NULL if it is the last. */
static char *first_part(struct arena *arena, const char *name, const char **rest)
{
    struct text text = {.arena = arena};

    *rest = NULL;
    for (; *name; name++) {
        if (*name == '>' && name[1] == '>') {
            name++;
        } else if (*name == '>') {
            *rest = name + 1;
            break;
        }
        text_add(&text, name, 1);
    }
    return arena_text(arena, text_string(&text), text.length);
}

static bool has_name(const struct script_entry *entry, const char *name, unsigned long index,
                     unsigned long number)
{
    return index == number || strcmp(entry->id, name) == 0 || strcmp(entry->title, name) == 0;
}

static bool is_number(const char *text)
{
    return *text && strspn(text, "0123456789") == strlen(text) && strlen(text) < 9;
}

static const struct menu_item *item_of(const struct menu *menu, const struct script_entry *entry)
{
    for (size_t i = 0; i < menu->count; i++)
        if (menu->items[i].entry == entry)
            return &menu->items[i];
    return NULL;
}

/* The first item that lies in a submenu, however deep. */
static const struct menu_item *item_in(const struct menu *menu, const struct script_entry *submenu)
{
    for (size_t i = 0; i < menu->count; i++) {
        const struct script_entry *entry = menu->items[i].entry;

        while (entry && entry != submenu)
            entry = entry->parent;
        if (entry)
            return &menu->items[i];
    }
    return NULL;
}

const struct menu_item *script_default(const struct script *script, const struct menu *menu,
                                       const char *name)
{
    const struct script_entry *level = script->entries;

    for (unsigned depth = 0; depth <= SUBMENUS_MAX && *name; depth++) {
        const char *rest;
        char *part = first_part(menu->arena, name, &rest);
        unsigned long number = is_number(part) ? strtoul(part, NULL, 10) : ~0UL, index = 0;
        const struct script_entry *found = level;

        while (found && !has_name(found, part, index, number)) {
            found = found->next;
            index++;
        }
        if (!found)
            return NULL;
        if (!found->submenu)
            return item_of(menu, found);
        if (!rest)
            return item_in(menu, found);
        level = found->children;
        name = rest;
    }
    return NULL;
}
