/* SPDX-License-Identifier: BSD-3-Clause */
/* pcow-img: the tool for image files, with qemu-img's conventions. */
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "interrupt.h"
#include "options.h"
#include "report.h"

static const struct command *const commands[] = {
    &amend_command,    &check_command,  &checksum_command, &commit_command, &compare_command,
    &convert_command,  &create_command, &info_command,     &list_command,   &map_command,
    &measure_command,  &probe_command,  &rebase_command,   &rescue_command, &resize_command,
    &seal_command,
    &snapshot_command, &unseal_command,
};

static const size_t command_count = sizeof(commands) / sizeof(commands[0]);

int command_help(const struct command *command, FILE *stream)
{
    fprintf(stream, "usage: pcow-img %s %s\n%s\n\n  -h, --help                 this text\n%s",
            command->name, command->arguments, command->summary, command->help);
    return EXIT_SUCCESS;
}

const char *only_operand(const struct command *command, int argc, char **argv)
{
    (void)command;
    return check_operands(argc, argv, 1, 1, "FILE") ? argv[optind] : NULL;
}

static int unknown(const char *name)
{
    const char *names[sizeof(commands) / sizeof(commands[0]) + 1] = {NULL};

    for (size_t i = 0; i < command_count; i++) {
        names[i] = commands[i]->name;
    }
    report_unknown("command", name, names, "'pcow-img --help'");
    return EXIT_FAILURE;
}

static int help(void)
{
    puts("usage: pcow-img [-h | --help | -V | --version] COMMAND [OPTION]... [OPERAND]...\n"
         "Work on pcow images: virtual machine images for persistent memory.\n\nCommands:");
    for (size_t i = 0; i < command_count; i++) {
        printf("  %-9s %s\n", commands[i]->name, commands[i]->summary);
    }
    puts("\n'pcow-img COMMAND --help' shows the options of a command.\n"
         "Formats: pcow (format 2), pcow1 (format 1, read-only), raw, qcow2. A format is never "
         "guessed from content.\n"
         "Sizes: a number of bytes, or one with K, M, G, T, P, E, which count in 1024 "
         "(1.5G, 2 MiB).");
    return EXIT_SUCCESS;
}

static int version(void)
{
    printf("pcow-img version %s\n", pcow_version());
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : NULL;

    if (!name) {
        report("expecting a command; see 'pcow-img --help'");
        return EXIT_FAILURE;
    }
    if (!strcmp(name, "-h") || !strcmp(name, "--help") || !strcmp(name, "help")) {
        return help();
    }
    if (!strcmp(name, "-V") || !strcmp(name, "--version")) {
        return version();
    }
    for (size_t i = 0; i < command_count; i++) {
        if (strcmp(name, commands[i]->name)) {
            continue;
        }
        if (argc > 2 && !strcmp(argv[2], "--version")) {
            return version();
        }
        return interrupt_obey(commands[i]->run(argc - 1, argv + 1));
    }
    return unknown(name);
}
