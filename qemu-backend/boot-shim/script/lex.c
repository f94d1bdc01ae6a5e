/* SPDX-License-Identifier: BSD-3-Clause */
/* Tokens of GRUB's script language (its grub-core/script/yylex.l says which there are). */
#include "script/lex.h"

#include <string.h>

/* What ends a word unless it is quoted. '|', '&', '<' and '>' mean nothing in GRUB but an error. */
static const char ends[] = "{}|&;<> \t\n\r";

void lexer_open(struct lexer *lexer, struct arena *arena, const char *text, size_t length)
{
    memset(lexer, 0, sizeof *lexer);
    lexer->arena = arena;
    lexer->at = text;
    lexer->end = text + length;
    lexer_next(lexer);
}

static bool is_name(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'
           || (!first && c >= '0' && c <= '9');
}

/* A word as it grows. */
struct growing {
    struct part **last;
    struct text text;
    bool any_text;
};

static void add_part(struct lexer *lexer, struct growing *word, const char *text, size_t length,
                     bool variable, bool quoted)
{
    struct part *part = arena_alloc(lexer->arena, sizeof *part);

    part->text = arena_text(lexer->arena, text, length);
    part->variable = variable;
    part->quoted = quoted;
    *word->last = part;
    word->last = &part->next;
}

static void end_text(struct lexer *lexer, struct growing *word, bool quoted)
{
    if (word->any_text)
        add_part(lexer, word, text_string(&word->text), word->text.length, false, quoted);
    word->text = (struct text){.arena = lexer->arena};
    word->any_text = false;
}

static void add_character(struct growing *word, char c)
{
    text_add(&word->text, &c, 1);
    word->any_text = true;
}

/* Behind '$'; false if it is no variable but the character itself. */
static bool read_variable(struct lexer *lexer, struct growing *word, bool quoted)
{
    const char *name = lexer->at, *end;
    bool braces = name < lexer->end && *name == '{';

    if (braces)
        name++;
    end = name;
    if (end < lexer->end && *end && strchr("?@#*", *end))
        end++;
    else if (end < lexer->end && *end >= '0' && *end <= '9')
        while (end < lexer->end && *end >= '0' && *end <= '9')
            end++;
    else
        while (end < lexer->end && is_name(*end, end == name))
            end++;
    if (end == name || (braces && (end == lexer->end || *end != '}')))
        return false;
    end_text(lexer, word, quoted);
    add_part(lexer, word, name, (size_t)(end - name), true, quoted);
    lexer->at = end + (braces ? 1 : 0);
    return true;
}

static bool read_quoted(struct lexer *lexer, struct growing *word, char quote)
{
    end_text(lexer, word, false);
    word->any_text = true; /* "" is a word */
    while (lexer->at < lexer->end) {
        char c = *lexer->at++;

        if (c == quote) {
            end_text(lexer, word, true);
            return true;
        }
        if (quote == '"' && c == '\\' && lexer->at < lexer->end && strchr("$\"\\\n", *lexer->at)
            && *lexer->at) {
            if (*lexer->at != '\n')
                add_character(word, *lexer->at);
            lexer->at++;
        } else if (!(quote == '"' && c == '$' && read_variable(lexer, word, true))) {
            add_character(word, c);
        }
    }
    return false;
}

static bool read_word(struct lexer *lexer)
{
    struct word *result = arena_alloc(lexer->arena, sizeof *result);
    struct growing word = {.last = &result->parts, .text = {.arena = lexer->arena}};

    while (lexer->at < lexer->end && !(*lexer->at && strchr(ends, *lexer->at))) {
        char c = *lexer->at++;

        if (c == '\'' || c == '"') {
            if (!read_quoted(lexer, &word, c))
                return false;
        } else if (c == '\\' && lexer->at < lexer->end) {
            if (*lexer->at != '\n')
                add_character(&word, *lexer->at);
            lexer->at++;
        } else if (!(c == '$' && read_variable(lexer, &word, false))) {
            add_character(&word, c);
        }
    }
    end_text(lexer, &word, false);
    lexer->word = result;
    return true;
}

static void skip_blanks(struct lexer *lexer)
{
    while (lexer->at < lexer->end) {
        size_t left = (size_t)(lexer->end - lexer->at);

        if (*lexer->at == ' ' || *lexer->at == '\t' || *lexer->at == '\r')
            lexer->at++;
        else if (left >= 2 && memcmp(lexer->at, "\\\n", 2) == 0)
            lexer->at += 2;
        else if (*lexer->at == '#')
            while (lexer->at < lexer->end && *lexer->at != '\n')
                lexer->at++;
        else
            return;
    }
}

void lexer_next(struct lexer *lexer)
{
    arena_step(lexer->arena);
    skip_blanks(lexer);
    if (lexer->at == lexer->end) {
        lexer->token = TOKEN_END;
        return;
    }
    switch (*lexer->at) {
    case '\n':
    case ';':
        lexer->at++;
        lexer->token = TOKEN_LINE;
        return;
    case '{':
        lexer->at++;
        lexer->token = TOKEN_OPEN;
        return;
    case '}':
        lexer->at++;
        lexer->token = TOKEN_CLOSE;
        return;
    case '|':
    case '&':
    case '<':
    case '>':
        lexer->at++;
        lexer->token = TOKEN_BAD;
        return;
    default: lexer->token = read_word(lexer) ? TOKEN_WORD : TOKEN_BAD;
    }
}

void lexer_skip_line(struct lexer *lexer)
{
    /* The token that is looked at may be the end of the line already. */
    if (lexer->token == TOKEN_LINE) {
        lexer_next(lexer);
        return;
    }
    while (lexer->at < lexer->end && *lexer->at != '\n')
        lexer->at++;
    lexer_next(lexer);
}

bool lexer_is(const struct lexer *lexer, const char *keyword)
{
    const struct part *part;

    if (lexer->token != TOKEN_WORD || !lexer->word->parts)
        return false;
    part = lexer->word->parts;
    return !part->next && !part->variable && !part->quoted && strcmp(part->text, keyword) == 0;
}
