/* SPDX-License-Identifier: BSD-3-Clause */
#include "script/script.h"

#include <string.h>

#define DEPTH_MAX 256

void script_open(struct script *script, struct arena *arena, const struct volumes *volumes)
{
    memset(script, 0, sizeof *script);
    script->arena = arena;
    script->volumes = volumes;
    script->last_entry = &script->entries;
}

const char *script_find(const struct script *script, const char *name)
{
    for (const struct variable *at = script->variables; at; at = at->next)
        if (strcmp(at->name, name) == 0)
            return at->value;
    return NULL;
}

const char *script_get(const struct script *script, const char *name)
{
    const char *value = script_find(script, name);

    return value ? value : "";
}

void script_set(struct script *script, const char *name, const char *value)
{
    struct variable *at = script->variables;

    while (at && strcmp(at->name, name) != 0)
        at = at->next;
    if (!at) {
        if (!value || strlen(name) > NAME_MAX_LENGTH)
            return;
        if (++script->variables_count > VARIABLES_MAX)
            longjmp(script->arena->out, 1);
        at = arena_alloc(script->arena, sizeof *at);
        at->name = arena_text(script->arena, name, strlen(name));
        at->next = script->variables;
        script->variables = at;
    }
    at->value = value ? arena_text(script->arena, value, strlen(value)) : NULL;
}

static void run_function(struct script *script, const struct function *function, size_t argc,
                         char **argv)
{
    size_t outer_argc = script->argc;
    char **outer_argv = script->argv;
    unsigned outer_loops = script->loops;

    script->argc = argc - 1;
    script->argv = argv + 1;
    script->loops = 0;
    script_run(script, function->block);
    if (script->flow == FLOW_RETURN)
        script->flow = FLOW_ON;
    script->argc = outer_argc;
    script->argv = outer_argv;
    script->loops = outer_loops;
}

static void run_command(struct script *script, const struct node *node)
{
    char **argv, *equals;
    size_t argc = script_expand(script, node->words, &argv);
    int status;

    if (!argc)
        return;
    for (const struct function *at = script->functions; at; at = at->next) {
        if (strcmp(at->name, argv[0]) == 0) {
            run_function(script, at, argc, argv);
            return;
        }
    }
    status = script_command(script, argc, argv, node);
    if (status < 0) {
        equals = strchr(argv[0], '=');
        if (equals && equals != argv[0]) {
            *equals = '\0';
            script_set(script, argv[0], equals + 1);
        }
        status = equals && equals != argv[0] ? 0 : 1;
    }
    script->status = status;
}

static bool leaves_loop(struct script *script)
{
    if (script->flow == FLOW_CONTINUE)
        script->flow = FLOW_ON;
    if (script->flow == FLOW_BREAK) {
        script->flow = FLOW_ON;
        return true;
    }
    return script->flow != FLOW_ON;
}

static void run_while(struct script *script, const struct node *node)
{
    script->loops++;
    for (;;) {
        arena_step(script->arena);
        script_run(script, node->condition);
        if (script->flow != FLOW_ON || (script->status == 0) != (node->kind == NODE_WHILE))
            break;
        script_run(script, node->block);
        if (leaves_loop(script))
            break;
    }
    script->loops--;
}

static void run_for(struct script *script, const struct node *node)
{
    char **argv;
    size_t argc = script_expand(script, node->words, &argv);

    script->loops++;
    for (size_t i = 0; i < argc; i++) {
        arena_step(script->arena);
        script_set(script, node->name, argv[i]);
        script_run(script, node->block);
        if (leaves_loop(script))
            break;
    }
    script->loops--;
}

static void run_if(struct script *script, const struct node *node)
{
    script_run(script, node->condition);
    if (script->flow != FLOW_ON)
        return;
    if (script->status == 0) {
        script_run(script, node->block);
    } else {
        script->status = 0;
        script_run(script, node->otherwise);
    }
}

static void define(struct script *script, const struct node *node)
{
    struct function *function = arena_alloc(script->arena, sizeof *function);

    if (++script->functions_count > VARIABLES_MAX || strlen(node->name) > NAME_MAX_LENGTH)
        longjmp(script->arena->out, 1);
    function->name = node->name;
    function->block = node->block;
    function->next = script->functions;
    script->functions = function;
    script->status = 0;
}

void script_run(struct script *script, const struct node *list)
{
    if (script->depth >= DEPTH_MAX)
        longjmp(script->arena->out, 1);
    script->depth++;
    for (; list && script->flow == FLOW_ON; list = list->next) {
        arena_step(script->arena);
        switch (list->kind) {
        case NODE_COMMAND: run_command(script, list); break;
        case NODE_IF: run_if(script, list); break;
        case NODE_WHILE:
        case NODE_UNTIL: run_while(script, list); break;
        case NODE_FOR: run_for(script, list); break;
        case NODE_FUNCTION: define(script, list); break;
        }
        if (list->negated)
            script->status = !script->status;
    }
    script->depth--;
}

void script_run_text(struct script *script, const char *text, size_t length)
{
    unsigned errors = 0;

    script_run(script, script_parse(script->arena, text, length, &errors));
    script->errors += errors;
}

int script_run_file(struct script *script, const char *path)
{
    const char *rest;
    const struct volume *volume = script_path(script, path, &rest);
    size_t length;
    char *text;

    if (!volume || script->sources >= SOURCES_MAX)
        return 1;
    text = volume_read(script->arena, volume, rest, CONFIG_MAX, &length);
    if (!text)
        return 1;
    script->sources++;
    script_run_text(script, text, length);
    script->sources--;
    return script->status;
}

const struct volume *script_path(const struct script *script, const char *path, const char **rest)
{
    const char *name = script_get(script, "root");
    size_t length = strlen(name);

    if (*path == '(') {
        const char *end = strchr(path, ')');

        if (!end)
            return NULL;
        name = path + 1;
        length = (size_t)(end - name);
        path = end + 1;
    }
    *rest = path;
    return volumes_find(script->volumes, name, length);
}
