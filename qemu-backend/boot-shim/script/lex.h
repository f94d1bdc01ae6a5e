/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef SHIM_SCRIPT_LEX_H
#define SHIM_SCRIPT_LEX_H

#include "script/parse.h"

enum token { TOKEN_END, TOKEN_LINE, TOKEN_OPEN, TOKEN_CLOSE, TOKEN_WORD, TOKEN_BAD };

struct lexer {
    struct arena *arena;
    const char *at, *end;
    enum token token; /* the one that is looked at */
    struct word *word;
};

void lexer_open(struct lexer *lexer, struct arena *arena, const char *text, size_t length);
void lexer_next(struct lexer *lexer);
/* To the end of the line that is being read. */
void lexer_skip_line(struct lexer *lexer);
/* Whether a word stands there that is this text and nothing else, without quotes. */
bool lexer_is(const struct lexer *lexer, const char *keyword);

#endif
