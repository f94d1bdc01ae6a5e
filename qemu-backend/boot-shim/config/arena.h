/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory for what is read from a guest: given back all at once, and never more than a limit,
 * however much a hostile file asks for. Whoever asks for more leaves through arena->out.
 */
#ifndef SHIM_CONFIG_ARENA_H
#define SHIM_CONFIG_ARENA_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct arena_block;

struct arena {
    struct arena_block *blocks;
    size_t left; /* bytes that may still be taken */
    uint64_t steps; /* what may still be done: each command and each loop takes one */
    jmp_buf out; /* set by whoever begins to read a configuration */
};

void arena_open(struct arena *arena, size_t limit, uint64_t steps);
void arena_close(struct arena *arena);

/* Zeroed memory; never NULL. */
void *arena_alloc(struct arena *arena, size_t size);
/* The same, NULL if there is no room. */
void *arena_try(struct arena *arena, size_t size);
char *arena_text(struct arena *arena, const char *text, size_t length);
char *arena_format(struct arena *arena, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Count one step; leaves when too many were taken. */
void arena_step(struct arena *arena);

/* A text that grows. */
struct text {
    struct arena *arena;
    char *data; /* ends with a zero byte once something was added; NULL before */
    size_t length, room;
};

void text_add(struct text *text, const char *data, size_t length);
void text_add_string(struct text *text, const char *string);
/* "" if nothing was added. */
const char *text_string(const struct text *text);

#endif
