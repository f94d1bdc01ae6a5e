/* SPDX-License-Identifier: BSD-3-Clause */
/* The commands of pcow-io. */
#ifndef IO_COMMAND_H
#define IO_COMMAND_H

#include "session.h"

struct command {
    const char *name, *short_name;             /* short_name: NULL if there is none */
    const char *arguments;
    const char *summary;
    /* of getopt(), beginning with ':'; NULL: no options */
    const char *letters;
    int least, most;                           /* operands after the options; most -1: any number */
    /*
     * argv[optind] is the first operand when it is called with no options; returns false after a
     * failure was reported
     */
    bool (*run)(struct session *session, const struct command *command, int argc, char **argv);
};

/* end: name NULL */
extern const struct command transfer_commands[], query_commands[], snapshot_commands[];

/* Execute one line; false if it failed, which has been reported. */
bool execute_line(struct session *session, const char *line);

/* The next option letter, -1 at the end (operands have been counted), '?' after a report. */
int next_letter(const struct command *command, int argc, char **argv);

/* Report that command failed and why; false. */
bool command_failed(const struct command *command, const struct pcow_error *error);

#endif
