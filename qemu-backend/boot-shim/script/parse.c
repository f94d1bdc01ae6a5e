/* SPDX-License-Identifier: BSD-3-Clause */
#include "script/parse.h"

#include <string.h>

#include "script/lex.h"

#define DEPTH_MAX 64

struct parser {
    struct lexer lexer;
    struct arena *arena;
    unsigned errors, depth;
};

static struct node *parse_list(struct parser *parser, const char *const *stops, bool braces);
static struct node *parse_statement(struct parser *parser);

static struct node *new_node(struct parser *parser, enum node_kind kind)
{
    struct node *node = arena_alloc(parser->arena, sizeof *node);

    node->kind = kind;
    return node;
}

static bool take(struct parser *parser, const char *keyword)
{
    if (!lexer_is(&parser->lexer, keyword))
        return false;
    lexer_next(&parser->lexer);
    return true;
}

static void skip_lines(struct parser *parser)
{
    while (parser->lexer.token == TOKEN_LINE)
        lexer_next(&parser->lexer);
}

/* { commands }; true if it was one. */
static bool parse_block(struct parser *parser, struct node **block)
{
    if (parser->lexer.token != TOKEN_OPEN)
        return false;
    lexer_next(&parser->lexer);
    *block = parse_list(parser, NULL, true);
    if (parser->lexer.token != TOKEN_CLOSE)
        return false;
    lexer_next(&parser->lexer);
    return true;
}

static struct word *parse_words(struct parser *parser)
{
    struct word *first = NULL, **last = &first;

    while (parser->lexer.token == TOKEN_WORD) {
        *last = parser->lexer.word;
        last = &parser->lexer.word->next;
        lexer_next(&parser->lexer);
    }
    return first;
}

static struct node *parse_if(struct parser *parser)
{
    static const char *const then[] = {"then", NULL};
    static const char *const end[] = {"elif", "else", "fi", NULL};
    struct node *node = new_node(parser, NODE_IF), *at = node;

    for (;;) {
        at->condition = parse_list(parser, then, false);
        if (!take(parser, "then"))
            return NULL;
        at->block = parse_list(parser, end, false);
        if (!take(parser, "elif"))
            break;
        at->otherwise = new_node(parser, NODE_IF);
        at = at->otherwise;
    }
    if (take(parser, "else"))
        at->otherwise = parse_list(parser, end + 2, false);
    return take(parser, "fi") ? node : NULL;
}

static struct node *parse_loop(struct parser *parser, struct node *node)
{
    static const char *const begin[] = {"do", NULL}, *const end[] = {"done", NULL};

    if (node->kind == NODE_FOR) {
        const struct word *word = parser->lexer.word;

        if (parser->lexer.token != TOKEN_WORD || !word->parts || word->parts->variable)
            return NULL;
        node->name = word->parts->text;
        lexer_next(&parser->lexer);
        if (!take(parser, "in"))
            return NULL;
        node->words = parse_words(parser);
        skip_lines(parser);
    } else {
        node->condition = parse_list(parser, begin, false);
    }
    if (!take(parser, "do"))
        return NULL;
    node->block = parse_list(parser, end, false);
    return take(parser, "done") ? node : NULL;
}

static struct node *parse_function(struct parser *parser)
{
    struct node *node = new_node(parser, NODE_FUNCTION);
    const struct word *word = parser->lexer.word;

    if (parser->lexer.token != TOKEN_WORD || !word->parts || word->parts->variable)
        return NULL;
    node->name = word->parts->text;
    lexer_next(&parser->lexer);
    skip_lines(parser);
    return parse_block(parser, &node->block) ? node : NULL;
}

static struct node *parse_command(struct parser *parser)
{
    struct node *node = new_node(parser, NODE_COMMAND);

    node->words = parse_words(parser);
    if (!node->words)
        return NULL;
    if (parser->lexer.token == TOKEN_OPEN) {
        node->has_block = true;
        if (!parse_block(parser, &node->block))
            return NULL;
    }
    return node;
}

static struct node *parse_statement(struct parser *parser)
{
    bool negated = false;
    struct node *node;

    while (take(parser, "!"))
        negated = !negated;
    if (take(parser, "if"))
        node = parse_if(parser);
    else if (take(parser, "while"))
        node = parse_loop(parser, new_node(parser, NODE_WHILE));
    else if (take(parser, "until"))
        node = parse_loop(parser, new_node(parser, NODE_UNTIL));
    else if (take(parser, "for"))
        node = parse_loop(parser, new_node(parser, NODE_FOR));
    else if (take(parser, "function"))
        node = parse_function(parser);
    else
        node = parse_command(parser);
    if (node)
        node->negated = negated;
    return node;
}

static bool stopped(const struct parser *parser, const char *const *stops)
{
    for (; stops && *stops; stops++)
        if (lexer_is(&parser->lexer, *stops))
            return true;
    return false;
}

/*
 * Statements up to one of the words in stops, or '}'; @braces says that the latter belongs to the
 * caller.
 */
static struct node *parse_list(struct parser *parser, const char *const *stops, bool braces)
{
    struct node *first = NULL, **last = &first;
    bool outermost = parser->depth == 0;

    if (++parser->depth > DEPTH_MAX) {
        /* nobody writes that: the rest of the file is not read */
        parser->errors++;
        parser->lexer.at = parser->lexer.end;
        parser->lexer.token = TOKEN_END;
    }
    for (;;) {
        struct node *node;

        skip_lines(parser);
        if (parser->lexer.token == TOKEN_END || stopped(parser, stops))
            break;
        if (parser->lexer.token == TOKEN_CLOSE && (braces || !outermost))
            break;
        node = parse_statement(parser);
        if (node
            && (parser->lexer.token == TOKEN_LINE || parser->lexer.token == TOKEN_END
                || parser->lexer.token == TOKEN_CLOSE)) {
            *last = node;
            last = &node->next;
            if (parser->lexer.token != TOKEN_CLOSE || !outermost)
                continue;
        }
        if (parser->lexer.token == TOKEN_CLOSE && !outermost)
            break;
        parser->errors++;
        if (parser->lexer.token == TOKEN_END)
            break;
        lexer_skip_line(&parser->lexer);
    }
    parser->depth--;
    return first;
}

struct node *script_parse(struct arena *arena, const char *text, size_t length, unsigned *errors)
{
    struct parser parser = {.arena = arena};
    struct node *result;

    lexer_open(&parser.lexer, arena, text, length);
    result = parse_list(&parser, NULL, false);
    *errors = parser.errors;
    return result;
}
