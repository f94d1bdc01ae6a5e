/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/options.h"

#include <string.h>
#include <strings.h>

/* The next word, quotes and all; NULL at the end. Moves *at behind it. */
static const char *next_word(const char **at, size_t *length)
{
    const char *word = *at + strspn(*at, " \t\n"), *end = word;
    bool quoted = false;

    for (; *end && (quoted || !strchr(" \t\n", *end)); end++)
        if (*end == '"')
            quoted = !quoted;
    *at = end;
    *length = (size_t)(end - word);
    return *length ? word : NULL;
}

static bool is_end(const char *word, size_t length)
{
    return length == 2 && memcmp(word, "--", 2) == 0;
}

static bool has_name(const char *word, size_t length, const char *name)
{
    size_t size = strlen(name);

    return length > size && memcmp(word, name, size) == 0 && word[size] == '=';
}

char *options_value(struct arena *arena, const char *options, const char *name)
{
    const char *word, *found = NULL;
    size_t length, found_length = 0, skip = strlen(name) + 1;

    while ((word = next_word(&options, &length)) && !is_end(word, length)) {
        if (has_name(word, length, name)) {
            found = word;
            found_length = length;
        }
    }
    return found ? arena_text(arena, found + skip, found_length - skip) : NULL;
}

/* The names that a disk has elsewhere: vda3, sda3, xvda3, hda3, nvme0n1p3, and of no disk. */
static bool read_disk_name(const char *name, unsigned *partition)
{
    static const char *const prefixes[] = {"/dev/vd", "/dev/sd", "/dev/xvd", "/dev/hd"};
    const char *at = NULL;

    if (strncmp(name, "/dev/nvme0n1", 12) == 0) {
        at = name + 12;
        at += *at == 'p';
    }
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes && !at; i++) {
        size_t length = strlen(prefixes[i]);

        /* the first disk of its kind; what others are nobody knows */
        if (strncmp(name, prefixes[i], length) == 0 && name[length] == 'a')
            at = name + length + 1;
    }
    if (!at)
        return false;
    for (*partition = 0; *at >= '0' && *at <= '9' && *partition < 1000; at++)
        *partition = *partition * 10 + (unsigned)(*at - '0');
    return *at == '\0';
}

static bool is_prefix(const char *text, const char *prefix, const char **rest)
{
    size_t length = strlen(prefix);

    if (strncmp(text, prefix, length) != 0)
        return false;
    *rest = text + length;
    return true;
}

static bool is_root(const struct volume *volume, const char *value)
{
    unsigned partition;
    const char *rest;

    if (is_prefix(value, "UUID=", &rest) || is_prefix(value, "/dev/disk/by-uuid/", &rest))
        return *volume->uuid && strcasecmp(rest, volume->uuid) == 0;
    if (is_prefix(value, "LABEL=", &rest) || is_prefix(value, "/dev/disk/by-label/", &rest))
        return *volume->label && strcmp(rest, volume->label) == 0;
    if (is_prefix(value, "PARTUUID=", &rest) || is_prefix(value, "/dev/disk/by-partuuid/", &rest))
        return *volume->partuuid && strcasecmp(rest, volume->partuuid) == 0;
    if (is_prefix(value, "/dev/pmem", &rest))
        return strcmp(value + strlen("/dev/"), volume->device) == 0;
    return read_disk_name(value, &partition) && volume->disk == 0 && volume->partition == partition;
}

static const struct volume *find_root(const struct volumes *volumes, const char *value,
                                      size_t length)
{
    char name[128];

    if (length >= sizeof name)
        return NULL;
    memcpy(name, value, length);
    name[length] = '\0';
    for (size_t i = 0; i < volumes->count; i++)
        if (is_root(&volumes->item[i], name))
            return &volumes->item[i];
    return NULL;
}

const struct volume *options_root(const struct volumes *volumes, const char *options)
{
    const struct volume *root = NULL;
    const char *word;
    size_t length;

    while ((word = next_word(&options, &length)) && !is_end(word, length))
        if (has_name(word, length, "root"))
            root = find_root(volumes, word + 5, length - 5);
    return root;
}

static void add_word(struct text *text, const char *word, size_t length)
{
    if (text->length)
        text_add(text, " ", 1);
    text_add(text, word, length);
}

/* Whether a list of mount options has dax already. */
static bool has_dax(const char *flags)
{
    for (; *flags; flags += strcspn(flags, ","), flags += *flags == ',')
        if (strncmp(flags, "dax", 3) == 0)
            return true;
    return false;
}

static void add_ours(struct arena *arena, struct text *text, const char *options,
                     const struct additions *additions)
{
    char *flags = options_value(arena, options, "rootflags"), *word;

    if (additions->dax && !(flags && has_dax(flags))) {
        word = arena_format(arena, "rootflags=%s%s%s", flags ? flags : "",
                            flags && *flags ? "," : "", additions->dax);
        add_word(text, word, strlen(word));
    }
    if (additions->rdinit) {
        word = arena_format(arena, "rdinit=%s", additions->rdinit);
        add_word(text, word, strlen(word));
    }
    if (!options_value(arena, options, "console"))
        for (const char *const *at = additions->console; at && *at; at++)
            add_word(text, *at, strlen(*at));
    for (const char *const *at = additions->more; at && *at; at++)
        add_word(text, *at, strlen(*at));
}

const char *options_behind(const char *options)
{
    const char *at = options, *word;
    size_t length;

    while ((word = next_word(&at, &length)))
        if (is_end(word, length))
            return at + strspn(at, " ");
    return options + strlen(options);
}

char *options_make(struct arena *arena, const char *options, const struct additions *additions)
{
    struct text text = {.arena = arena};
    const char *at = options, *word;
    bool added = false;
    size_t length;

    while ((word = next_word(&at, &length))) {
        unsigned partition;
        char *value;

        if (is_end(word, length) && !added) {
            add_ours(arena, &text, options, additions);
            added = true;
        }
        value = arena_text(arena, word, length);
        if (!added && additions->root && has_name(word, length, "root")
            && read_disk_name(value + 5, &partition))
            value = arena_format(arena, "root=/dev/%s", additions->root->device);
        add_word(&text, value, strlen(value));
    }
    if (!added)
        add_ours(arena, &text, options, additions);
    return arena_text(arena, text_string(&text), text.length);
}
