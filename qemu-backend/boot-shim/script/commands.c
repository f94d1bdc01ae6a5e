/* SPDX-License-Identifier: BSD-3-Clause */
#include "script/script.h"

#include <stdlib.h>
#include <string.h>

typedef int command(struct script *script, size_t argc, char **argv);

static int succeed(struct script *script, size_t argc, char **argv)
{
    (void)script, (void)argc, (void)argv;
    return 0;
}

static int refuse(struct script *script, size_t argc, char **argv)
{
    (void)script, (void)argc, (void)argv;
    return 1;
}

static int set(struct script *script, size_t argc, char **argv)
{
    for (size_t i = 1; i < argc; i++) {
        char *equals = strchr(argv[i], '=');

        if (!equals)
            continue;
        *equals = '\0';
        script_set(script, argv[i], equals + 1);
    }
    return 0;
}

static int unset(struct script *script, size_t argc, char **argv)
{
    for (size_t i = 1; i < argc; i++)
        script_set(script, argv[i], NULL);
    return 0;
}

static int change(struct script *script, const char *name, long by)
{
    long value = strtol(script_get(script, name), NULL, 10);

    if (value < -1000000 || value > 1000000)
        return 1;
    script_set(script, name, arena_format(script->arena, "%ld", value + by));
    return 0;
}

static int increment(struct script *script, size_t argc, char **argv)
{
    return argc == 2 ? change(script, argv[1], 1) : 1;
}

static int decrement(struct script *script, size_t argc, char **argv)
{
    return argc == 2 ? change(script, argv[1], -1) : 1;
}

static int source(struct script *script, size_t argc, char **argv)
{
    return argc > 1 ? script_run_file(script, argv[1]) : 1;
}

static int configfile(struct script *script, size_t argc, char **argv)
{
    /* what a configuration has said before is none of the next one's menu */
    if (argc < 2)
        return 1;
    script->entries = NULL;
    script->last_entry = &script->entries;
    return script_run_file(script, argv[1]);
}

static int eval(struct script *script, size_t argc, char **argv)
{
    struct text text = {.arena = script->arena};

    if (script->sources >= SOURCES_MAX)
        return 1;
    for (size_t i = 1; i < argc; i++) {
        text_add_string(&text, argv[i]);
        text_add_string(&text, " ");
    }
    script->sources++;
    script_run_text(script, text_string(&text), text.length);
    script->sources--;
    return script->status;
}

static int leave(struct script *script, size_t argc, char **argv)
{
    script->flow = FLOW_RETURN;
    return argc > 1 ? (int)(strtol(argv[1], NULL, 10) & 0xff) : 0;
}

static int leave_loop(struct script *script, size_t argc, char **argv)
{
    (void)argc;
    if (!script->loops)
        return 1;
    script->flow = strcmp(argv[0], "break") == 0 ? FLOW_BREAK : FLOW_CONTINUE;
    return 0;
}

static int shift(struct script *script, size_t argc, char **argv)
{
    size_t by = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;

    if (by > script->argc)
        return 1;
    script->argc -= by;
    script->argv += by;
    return 0;
}

static int setparams(struct script *script, size_t argc, char **argv)
{
    script->argc = argc - 1;
    script->argv = argv + 1;
    return 0;
}

/* What boots something that is no Linux kernel, or does something else for good. */
static int foreign(struct script *script, size_t argc, char **argv)
{
    (void)argc;
    if (!script->choice) {
        script->flow = FLOW_EXIT;
        return 1;
    }
    script->foreign = argv[0];
    return 0;
}

static int bls(struct script *script, size_t argc, char **argv)
{
    (void)argc, (void)argv;
    return script_blscfg(script);
}

static const struct {
    const char *name;
    command *run;
} commands[] = {
    {"set", set},
    {"unset", unset},
    {"true", succeed},
    {":", succeed},
    {"false", refuse},
    {"[", script_test},
    {"test", script_test},
    {"export", succeed},
    {"load_env", script_load_env},
    {"save_env", script_save_env},
    {"search", script_search},
    {"search.fs_uuid", script_search},
    {"search.fs_label", script_search},
    {"search.file", script_search},
    {"probe", script_probe},
    {"linux", script_linux},
    {"linuxefi", script_linux},
    {"linux16", script_linux},
    {"initrd", script_initrd},
    {"initrdefi", script_initrd},
    {"initrd16", script_initrd},
    {"blscfg", bls},
    {"source", source},
    {".", source},
    {"configfile", configfile},
    {"eval", eval},
    {"return", leave},
    {"break", leave_loop},
    {"continue", leave_loop},
    {"shift", shift},
    {"setparams", setparams},
    {"increment", increment},
    {"decrement", decrement},
    /* they boot something else */
    {"chainloader", foreign},
    {"ntldr", foreign},
    {"multiboot", foreign},
    {"multiboot2", foreign},
    {"xen_hypervisor", foreign},
    {"kfreebsd", foreign},
    {"fwsetup", foreign},
    {"halt", foreign},
    {"reboot", foreign},
    {"exit", foreign},
    /* a processor of 64 bits */
    {"cpuid", succeed},
    /* there is no such thing here, and it is asked whether there is */
    {"loadfont", refuse},
    {"background_image", refuse},
    {"background_color", refuse},
    {"keystatus", refuse},
    {"read", refuse},
    {"regexp", refuse},
    {"smbios", refuse},
    {"sendkey", refuse},
    /* nothing depends on them */
    {"echo", succeed},
    {"insmod", succeed},
    {"rmmod", succeed},
    {"terminal", succeed},
    {"terminal_input", succeed},
    {"terminal_output", succeed},
    {"serial", succeed},
    {"sleep", succeed},
    {"clear", succeed},
    {"play", succeed},
    {"ls", succeed},
    {"cat", succeed},
    {"password", succeed},
    {"password_pbkdf2", succeed},
    {"authenticate", succeed},
    {"boot", succeed},
    {"bli", succeed},
    {"normal", succeed},
    {"devicetree", succeed},
    {"acpi", succeed},
    {"module", succeed},
    {"module2", succeed},
    {"xen_module", succeed},
};

int script_command(struct script *script, size_t argc, char **argv, const struct node *node)
{
    if (strcmp(argv[0], "menuentry") == 0 || strcmp(argv[0], "submenu") == 0)
        return script_menuentry(script, argc, argv, node);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(commands[i].name, argv[0]) == 0)
            return commands[i].run(script, argc, argv);
    return -1;
}
