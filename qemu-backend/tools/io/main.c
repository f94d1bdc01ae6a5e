/* SPDX-License-Identifier: BSD-3-Clause */
/* pcow-io: load and store in an image as a VM does, for tests and for support. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "guard.h"
#include "options.h"
#include "report.h"

static int help(void)
{
    puts("usage: pcow-io [OPTION]... [-c COMMAND]... FILE\n"
         "Execute commands on a pcow image, mapped as QEMU maps it; without -c they are read from "
         "stdin.\n\n"
         "  -c, --cmd COMMAND          execute this; may be given several times\n"
         "  -r, --read-only            open read-only\n"
         "  -U, --force-share          take no lock; read-only\n"
         "  -s, --snapshot NAME        show a snapshot; read-only\n"
         "  -f, --format FMT           pcow (default) or pcow1, which is read-only\n"
         "      --engine NAME          signal (default) or minor: how stores are caught\n"
         "      --full POLICY          fail (default) or wait: what a store does when the pool is "
         "full\n"
         "      --vma-budget NUMBER    memory mappings that the map may use\n"
         "      --no-map               do not map; copy in and out\n"
         "  -h, --help                 this text\n"
         "  -V, --version              the version\n\n"
         "'pcow-io -c help FILE' lists the commands. Exit code: 0, or 1 if anything failed.");
    return EXIT_SUCCESS;
}

static bool parse_choice(const char *option, const char *text, const char *const choices[2],
                         int *choice)
{
    for (*choice = 0; *choice < 2; (*choice)++) {
        if (!strcmp(text, choices[*choice])) {
            return true;
        }
    }
    report("%s takes '%s' or '%s', not '%s'", option, choices[0], choices[1], text);
    return false;
}

static bool parse_budget(const char *text, unsigned *budget)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);

    if (end == text || *end || text[0] == '-' || value == 0 || value > 1u << 30) {
        report("--vma-budget takes a number from 1, not '%s'", text);
        return false;
    }
    *budget = (unsigned)value;
    return true;
}

struct command_lines {
    char **line;
    size_t count;
};

static int parse_options(int argc, char **argv, struct session *session,
                         struct command_lines *lines)
{
    enum { ENGINE = 256, FULL, BUDGET, NO_MAP };
    static const struct option names[] = {
        {"cmd", required_argument, NULL, 'c'},    {"read-only", no_argument, NULL, 'r'},
        {"force-share", no_argument, NULL, 'U'},  {"snapshot", required_argument, NULL, 's'},
        {"format", required_argument, NULL, 'f'}, {"engine", required_argument, NULL, ENGINE},
        {"full", required_argument, NULL, FULL},  {"vma-budget", required_argument, NULL, BUDGET},
        {"no-map", no_argument, NULL, NO_MAP},    {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},      {NULL, 0, NULL, 0},
    };
    static const char *const engines[2] = {"signal", "minor"},
                             *const policies[2] = {"fail", "wait"},
                             *const formats[2] = {"pcow", "pcow1"};
    int option, choice;

    while ((option = next_option(argc, argv, ":c:rUs:f:hV", names)) != -1) {
        switch (option) {
        case 'c': lines->line[lines->count++] = optarg; break;
        case 'r': session->open_flags &= ~PCOW_OPEN_WRITE; break;
        case 'U':
            session->open_flags = (session->open_flags & ~PCOW_OPEN_WRITE) | PCOW_OPEN_FORCE_SHARE;
            break;
        case 's':
            session->snapshot = optarg;
            session->open_flags &= ~PCOW_OPEN_WRITE;
            break;
        case 'f':
            if (!parse_choice("-f", optarg, formats, &choice)) {
                return -EINVAL;
            }
            if (choice) {
                session->open_flags = (session->open_flags & ~PCOW_OPEN_WRITE) | PCOW_OPEN_FORMAT_1;
            }
            break;
        case ENGINE:
            if (!parse_choice("--engine", optarg, engines, &choice)) {
                return -EINVAL;
            }
            session->map_options.engine = choice ? PCOW_ENGINE_MINOR : PCOW_ENGINE_SIGNAL;
            break;
        case FULL:
            if (!parse_choice("--full", optarg, policies, &choice)) {
                return -EINVAL;
            }
            session->map_options.full_policy = choice ? PCOW_FULL_WAIT : PCOW_FULL_FAIL;
            break;
        case BUDGET:
            if (!parse_budget(optarg, &session->map_options.vma_budget)) {
                return -EINVAL;
            }
            break;
        case NO_MAP: session->use_map = false; break;
        case 'h': exit(help());
        case 'V':
            printf("pcow-io version %s\n", pcow_version());
            exit(EXIT_SUCCESS);
        default: return -EINVAL;
        }
    }
    if (optind != argc - 1) {
        report("expecting one image file name; see 'pcow-io --help'");
        return -EINVAL;
    }
    session->path = argv[optind];
    return 0;
}

static bool execute_stdin(struct session *session)
{
    bool prompt = isatty(STDIN_FILENO), ok = true;
    char *line = NULL;
    size_t size = 0;

    while (!session->done) {
        if (prompt) {
            fputs("pcow-io> ", stdout);
            fflush(stdout);
        }
        if (getline(&line, &size, stdin) < 0) {
            break;
        }
        ok &= execute_line(session, line);
    }
    free(line);
    return ok;
}

/* As qemu-io: a command that fails does not keep the next from being tried. */
static bool execute_all(struct session *session, const struct command_lines *lines)
{
    bool ok = true;

    if (lines->count == 0) {
        return execute_stdin(session);
    }
    for (size_t i = 0; i < lines->count && !session->done; i++) {
        ok &= execute_line(session, lines->line[i]);
    }
    return ok;
}

int main(int argc, char **argv)
{
    struct session session = {
        .open_flags = PCOW_OPEN_WRITE,
        .use_map = true,
        .map_options = {.full_policy = PCOW_FULL_FAIL},
    };
    struct command_lines lines = {.line = calloc((size_t)argc + 1, sizeof(char *))};
    struct pcow_error error;
    bool ok;

    if (!lines.line || parse_options(argc, argv, &session, &lines)) {
        free(lines.line);
        return EXIT_FAILURE;
    }
    guard_install();
    if (session_open(&session, &error)) {
        free(lines.line);
        return report_error(&error);
    }
    ok = execute_all(&session, &lines);
    free(lines.line);
    ok &= session_close(&session);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
