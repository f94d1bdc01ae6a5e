/* SPDX-License-Identifier: BSD-3-Clause */
#include "command.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "report.h"

#define MAX_WORDS 32
#define MAX_COMMANDS 64

static bool run_help(struct session *session, const struct command *command, int argc, char **argv);
static bool run_quit(struct session *session, const struct command *command, int argc, char **argv);

static const struct command own_commands[] = {
    {"help", "?", "[COMMAND]", "this list, or one command", NULL, 0, 1, run_help},
    {"quit", "q", "", "end", NULL, 0, 0, run_quit},
    {0},
};

static const struct command *const tables[] = {transfer_commands, query_commands, snapshot_commands,
                                               own_commands};

static void report_missing(const char *name)
{
    const char *names[MAX_COMMANDS + 1] = {NULL};
    size_t count = 0;

    for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++) {
        for (const struct command *c = tables[t]; c->name && count < MAX_COMMANDS; c++) {
            names[count++] = c->name;
        }
    }
    report_unknown("command", name, names, "'help'");
}

static const struct command *find(const char *name)
{
    for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++) {
        for (const struct command *c = tables[t]; c->name; c++) {
            if (!strcmp(name, c->name) || (c->short_name && !strcmp(name, c->short_name))) {
                return c;
            }
        }
    }
    report_missing(name);
    return NULL;
}

static void print_command(const struct command *command)
{
    printf("%s %s -- %s\n", command->name, command->arguments, command->summary);
}

static bool run_help(struct session *session, const struct command *command, int argc, char **argv)
{
    (void)session;
    (void)command;
    if (argc > 1) {
        const struct command *found = find(argv[1]);

        if (found) {
            print_command(found);
        }
        return found;
    }
    for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++) {
        for (const struct command *c = tables[t]; c->name; c++) {
            print_command(c);
        }
    }
    return true;
}

static bool run_quit(struct session *session, const struct command *command, int argc, char **argv)
{
    (void)command;
    (void)argc;
    (void)argv;
    session->done = true;
    return true;
}

static bool count_operands(const struct command *command, int count)
{
    if (count >= command->least && (command->most < 0 || count <= command->most)) {
        return true;
    }
    report("bad argument count %d to %s; usage: %s %s", count, command->name, command->name,
           command->arguments);
    return false;
}

int next_letter(const struct command *command, int argc, char **argv)
{
    int letter;

    opterr = 0;
    letter = getopt(argc, argv, command->letters);
    if (letter == '?' || letter == ':') {
        report("%s: option '-%c' %s; usage: %s %s", command->name, optopt,
               letter == ':' ? "needs a value" : "is not known", command->name, command->arguments);
        return '?';
    }
    return letter == -1 && !count_operands(command, argc - optind) ? '?' : letter;
}

bool command_failed(const struct command *command, const struct pcow_error *error)
{
    report("%s failed: %s", command->name, error->message);
    return false;
}

static bool execute_words(struct session *session, int argc, char **argv)
{
    const struct command *command = find(argv[0]);

    if (!command) {
        return false;
    }
    optind = 0;                                /* glibc: start anew with this argv */
    if (!command->letters) {
        optind = 1;
        if (!count_operands(command, argc - 1)) {
            return false;
        }
    }
    return command->run(session, command, argc, argv);
}

bool execute_line(struct session *session, const char *line)
{
    char *copy = strdup(line), *rest = copy, *word, *words[MAX_WORDS + 1];
    int count = 0;
    bool ok = true;

    while (copy && (word = strsep(&rest, " \t\n"))) {
        if (*word == '\0') {
            continue;
        }
        if (count == MAX_WORDS) {
            report("more than %d words in one command", MAX_WORDS);
            free(copy);
            return false;
        }
        words[count++] = word;
    }
    words[count] = NULL;
    if (!copy) {
        report("out of memory");
        return false;
    }
    if (count) {
        ok = execute_words(session, count, words);
        fflush(stdout);
    }
    free(copy);
    return ok;
}
