/* SPDX-License-Identifier: BSD-3-Clause */
/* GRUB's script language: the text of a grub.cfg becomes a tree of commands. */
#ifndef SHIM_SCRIPT_PARSE_H
#define SHIM_SCRIPT_PARSE_H

#include <stdbool.h>
#include <stddef.h>

#include "config/arena.h"

/* A piece of a word: text as it is, or the name of a variable. */
struct part {
    struct part *next;
    char *text;
    bool variable;
    bool quoted; /* in quotes: a variable stays one word, and there is one even if it is empty */
};

struct word {
    struct word *next;
    struct part *parts;
};

enum node_kind {
    NODE_COMMAND, /* words; block is what stood in { } behind them */
    NODE_IF, /* condition, block, otherwise */
    NODE_WHILE, /* condition, block */
    NODE_UNTIL, /* condition, block */
    NODE_FOR, /* name, words, block */
    NODE_FUNCTION, /* name, block */
};

struct node {
    struct node *next;
    enum node_kind kind;
    bool negated; /* "! command" */
    bool has_block;
    char *name;
    struct word *words;
    struct node *condition, *block, *otherwise;
};

/*
 * What cannot be read is left out up to the end of its line, as GRUB does.
 * @errors counts that.
 */
struct node *script_parse(struct arena *arena, const char *text, size_t length, unsigned *errors);

#endif
