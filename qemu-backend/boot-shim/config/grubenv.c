/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/grubenv.h"

#include <string.h>

static const char signature[] = "# GRUB Environment Block\n";
#define SIGNATURE_LENGTH (sizeof signature - 1)

static bool is_block(const char *data, size_t length)
{
    return length >= SIGNATURE_LENGTH && memcmp(data, signature, SIGNATURE_LENGTH) == 0;
}

/* The end of a line: a newline that no backslash takes away. */
static const char *line_end(const char *at, const char *end)
{
    for (; at < end && *at != '\n'; at++)
        if (*at == '\\' && at + 1 < end)
            at++;
    return at;
}

bool grubenv_read(struct arena *arena, const char *data, size_t length, grubenv_seen *seen,
                  void *context)
{
    const char *at = data + SIGNATURE_LENGTH, *end = data + length;

    if (!is_block(data, length))
        return false;
    while (at < end) {
        const char *stop = line_end(at, end);
        const char *equals = memchr(at, '=', (size_t)(stop - at));

        arena_step(arena);
        if (*at != '#' && equals && equals > at) {
            struct text value = {.arena = arena};

            for (const char *c = equals + 1; c < stop; c++) {
                if (*c == '\\' && c + 1 < stop)
                    c++;
                text_add(&value, c, 1);
            }
            seen(context, arena_text(arena, at, (size_t)(equals - at)), text_string(&value));
        }
        at = stop + 1;
    }
    return true;
}

char *grubenv_change(struct arena *arena, const char *data, size_t length, const char *name,
                     const char *value)
{
    const char *at = data + SIGNATURE_LENGTH, *end = data + length;
    struct text result = {.arena = arena};
    size_t name_length = strlen(name);

    if (!is_block(data, length))
        return NULL;
    text_add(&result, signature, SIGNATURE_LENGTH);
    while (at < end) {
        const char *stop = line_end(at, end);
        size_t line = (size_t)(stop - at);
        bool mine =
            line > name_length && memcmp(at, name, name_length) == 0 && at[name_length] == '=';

        /* comments stay; what fills the block has no end of its line */
        if (line && !mine && stop < end)
            text_add(&result, at, line + 1);
        at = stop + 1;
    }
    if (value) {
        text_add_string(&result, name);
        text_add(&result, "=", 1);
        for (; *value; value++) {
            if (*value == '\\' || *value == '\n')
                text_add(&result, "\\", 1);
            text_add(&result, value, 1);
        }
        text_add(&result, "\n", 1);
    }
    if (result.length > length)
        return NULL;
    while (result.length < length)
        text_add(&result, "#", 1);
    return result.data;
}
