/* SPDX-License-Identifier: BSD-3-Clause */
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "size.h"

int next_option(int argc, char **argv, const char *letters, const struct option *names)
{
    int option;

    opterr = 0;
    option = getopt_long(argc, argv, letters, names, NULL);
    if (option == ':' || option == '?') {
        const char *given = argv[optind - 1];
        const char *problem = option == ':' ? "needs a value" : "is not known or not complete";

        if (given[0] == '-' && given[1] == '-') {
            report("%s: option '%s' %s; see '%s %s --help'", argv[0], given, problem,
                   program_invocation_short_name, argv[0]);
        } else {
            report("%s: option '-%c' %s; see '%s %s --help'", argv[0], optopt, problem,
                   program_invocation_short_name, argv[0]);
        }
        return '?';
    }
    return option;
}

int next_key_value(char **list, char **key, char **value, struct pcow_error *error)
{
    char *in = *list, *out, *equals;

    if (!in || *in == '\0') {
        return 0;
    }
    *key = out = in;
    while (*in) {
        if (*in == ',') {
            in++;
            if (*in != ',') {
                break;
            }
        }
        *out++ = *in++;
    }
    *list = in;
    *out = '\0';
    equals = strchr(*key, '=');
    if (!equals) {
        return fail(error, -EINVAL, "option '%s' of -o needs a value: %s=VALUE", *key, *key);
    }
    *equals = '\0';
    *value = equals + 1;
    return 1;
}

bool append_key_values(char **list, const char *more)
{
    size_t used = *list ? strlen(*list) : 0;
    char *longer = realloc(*list, used + strlen(more) + 2);

    if (!longer) {
        report("out of memory");
        return false;
    }
    sprintf(longer + used, "%s%s", used ? "," : "", more);
    *list = longer;
    return true;
}

bool parse_output(const char *text, bool *json)
{
    *json = !strcmp(text, "json");
    if (!*json && strcmp(text, "human")) {
        report("--output must be 'human' or 'json', not '%s'", text);
        return false;
    }
    return true;
}

bool parse_size_option(const char *what, const char *text, uint64_t *size)
{
    switch (parse_size(text, size)) {
    case 0:
        return true;
    case -ERANGE:
        report("%s '%s' is too large", what, text);
        return false;
    default:
        report("%s '%s' is not a size: give a number, with k, M, G, T, P or E for powers of 1024",
               what, text);
        return false;
    }
}
