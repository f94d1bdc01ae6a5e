/* SPDX-License-Identifier: BSD-3-Clause */
/* What the subcommands of pcow-img share. */
#ifndef IMG_COMMAND_H
#define IMG_COMMAND_H

#include <pcow.h>
#include <stdio.h>

struct command {
    const char *name;
    const char *arguments;                     /* one line: options and operands */
    const char *summary;                       /* one line */
    const char *help;                          /* the options, one a line */
    int (*run)(int argc, char **argv);         /* argv[0] is the name; returns the exit code */
};

extern const struct command amend_command, create_command, info_command, map_command, check_command,
    convert_command, snapshot_command, rebase_command, commit_command, resize_command,
    compare_command, measure_command, checksum_command, probe_command, rescue_command, seal_command,
    unseal_command, list_command;

/* Prints the help of a command on stream; returns EXIT_SUCCESS. */
int command_help(const struct command *command, FILE *stream);

/*
 * The only operand of a command, or NULL after a report.
 */
const char *only_operand(const struct command *command, int argc, char **argv);

#define HELP_OPTION {"help", no_argument, NULL, 'h'}
#define END_OF_OPTIONS {NULL, 0, NULL, 0}

#endif
