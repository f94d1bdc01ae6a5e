/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/arena.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_SIZE ((size_t)64 << 10)
#define ALIGNMENT ((size_t)16)

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    _Alignas(16) char data[];
};

void arena_open(struct arena *arena, size_t limit, uint64_t steps)
{
    memset(arena, 0, sizeof *arena);
    arena->left = limit;
    arena->steps = steps;
}

void arena_close(struct arena *arena)
{
    while (arena->blocks) {
        struct arena_block *block = arena->blocks;

        arena->blocks = block->next;
        free(block);
    }
}

void *arena_try(struct arena *arena, size_t size)
{
    struct arena_block *block = arena->blocks;
    void *result;

    if (size > SIZE_MAX / 2)
        return NULL;
    size = (size + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    if (size > arena->left)
        return NULL;
    if (!block || block->size - block->used < size) {
        size_t room = size > BLOCK_SIZE ? size : BLOCK_SIZE;

        block = calloc(1, sizeof *block + room);
        if (!block)
            return NULL;
        block->size = room;
        block->next = arena->blocks;
        arena->blocks = block;
    }
    result = block->data + block->used;
    block->used += size;
    arena->left -= size;
    return result;
}

void *arena_alloc(struct arena *arena, size_t size)
{
    void *result = arena_try(arena, size);

    if (!result)
        longjmp(arena->out, 1);
    return result;
}

char *arena_text(struct arena *arena, const char *text, size_t length)
{
    char *copy = arena_alloc(arena, length + 1);

    if (length)
        memcpy(copy, text, length);
    return copy;
}

char *arena_format(struct arena *arena, const char *format, ...)
{
    va_list args;
    char *result, nothing[1];
    int length;

    /* GCC 12 with UBSan takes it for NULL where nothing is written at all. */
    va_start(args, format);
    length = vsnprintf(nothing, sizeof nothing, format ? format : "", args);
    va_end(args);
    if (length < 0)
        longjmp(arena->out, 1);
    result = arena_alloc(arena, (size_t)length + 1);
    va_start(args, format);
    vsnprintf(result, (size_t)length + 1, format, args);
    va_end(args);
    return result;
}

void arena_step(struct arena *arena)
{
    if (!arena->steps)
        longjmp(arena->out, 1);
    arena->steps--;
}

void text_add(struct text *text, const char *data, size_t length)
{
    if (text->room - text->length <= length) {
        size_t room = (text->room + length + 32) * 2;
        char *larger = arena_alloc(text->arena, room);

        if (text->length)
            memcpy(larger, text->data, text->length);
        text->data = larger;
        text->room = room;
    }
    if (length)
        memcpy(text->data + text->length, data, length);
    text->length += length;
    text->data[text->length] = '\0';
}

void text_add_string(struct text *text, const char *string)
{
    text_add(text, string, strlen(string));
}

const char *text_string(const struct text *text)
{
    return text->data ? text->data : "";
}
