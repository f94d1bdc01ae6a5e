/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/bls.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config/version.h"

#define ENTRY_MAX ((size_t)64 << 10)

const char *bls_name(struct arena *arena, const char *file, const char *suffix, bool *exhausted)
{
    size_t length = strlen(file) - strlen(suffix);
    char *name = arena_text(arena, file, length), *plus = strrchr(name, '+');

    *exhausted = false;
    if (plus && plus[1] >= '0' && plus[1] <= '9'
        && strspn(plus + 1, "0123456789-") == strlen(plus + 1)) {
        *exhausted = strtoul(plus + 1, NULL, 10) == 0;
        *plus = '\0';
    }
    return name;
}

static const char *join(struct arena *arena, const char *first, const char *second)
{
    return first ? arena_format(arena, "%s %s", first, second) : second;
}

static void set_field(struct arena *arena, struct bls_entry *entry, const char *key, char *value,
                      bool *foreign)
{
    const struct {
        const char *key;
        const char **field;
    } fields[] = {
        {"title", &entry->title},       {"version", &entry->version},
        {"sort-key", &entry->sort_key}, {"machine-id", &entry->machine_id},
        {"linux", &entry->kernel},      {"efi", &entry->efi},
        {"uki", &entry->efi},
    };

    if (strcmp(key, "options") == 0) {
        entry->options = join(arena, entry->options, value);
    } else if (strcmp(key, "initrd") == 0) {
        /* GRUB's blscfg takes several on a line */
        char *rest = value, *word;

        while ((word = strsep(&rest, " \t")))
            if (*word && entry->initrds_count < INITRDS_MAX)
                entry->initrds[entry->initrds_count++] = word;
    } else if (strcmp(key, "architecture") == 0) {
        *foreign = strcasecmp(value, "x64") != 0 && strcasecmp(value, "x86-64") != 0;
    } else {
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
            if (strcmp(fields[i].key, key) == 0)
                *fields[i].field = value;
    }
}

static bool read_entry(struct arena *arena, char *text, struct bls_entry *entry)
{
    bool foreign = false;
    char *line;

    while ((line = strsep(&text, "\n"))) {
        char *key, *value;
        size_t length;

        arena_step(arena);
        line += strspn(line, " \t");
        length = strlen(line);
        while (length && strchr(" \t\r", line[length - 1]))
            line[--length] = '\0';
        if (!*line || *line == '#')
            continue;
        key = line;
        value = line + strcspn(line, " \t");
        if (*value)
            *value++ = '\0';
        value += strspn(value, " \t");
        if (*value)
            set_field(arena, entry, key, value, &foreign);
    }
    return !foreign && (entry->kernel || entry->efi);
}

static const char *or_empty(const char *text)
{
    return text ? text : "";
}

int bls_compare(const void *a, const void *b)
{
    const struct bls_entry *x = a, *y = b;
    int order = x->exhausted - y->exhausted;

    if (!order)
        order = !x->sort_key - !y->sort_key;
    if (!order && x->sort_key) {
        order = strcmp(x->sort_key, y->sort_key);
        if (!order)
            order = strcmp(or_empty(x->machine_id), or_empty(y->machine_id));
        if (!order)
            order = -version_compare(or_empty(x->version), or_empty(y->version));
    }
    return order ? order : -version_compare(x->id, y->id);
}

void bls_sort(struct bls_entry *entries, size_t count)
{
    if (count)
        qsort(entries, count, sizeof *entries, bls_compare);
}

size_t bls_read(struct arena *arena, const struct volume *volume, const char *directory,
                struct bls_entry **entries)
{
    char **names;
    size_t count = volume_list(arena, volume, directory, ".conf", &names), used = 0;
    struct bls_entry *found = arena_alloc(arena, (count + 1) * sizeof *found);

    for (size_t i = 0; i < count; i++) {
        struct bls_entry *entry = &found[used];
        size_t length;
        char *text = volume_read(arena, volume, arena_format(arena, "%s/%s", directory, names[i]),
                                 ENTRY_MAX, &length);

        memset(entry, 0, sizeof *entry);
        entry->volume = volume;
        entry->id = bls_name(arena, names[i], ".conf", &entry->exhausted);
        if (text && strlen(text) == length && read_entry(arena, text, entry))
            used++;
    }
    bls_sort(found, used);
    *entries = found;
    return used;
}
