/* SPDX-License-Identifier: BSD-3-Clause */
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "size.h"
#include "util/nearest.h"

/* The word that "-5" stands at the beginning of. */
static const char *word_with(int argc, char **argv, int letter)
{
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' && argv[i][1] == letter) {
            return argv[i];
        }
    }
    return NULL;
}

void report_unknown(const char *what, const char *word, const char *const *names, const char *where)
{
    struct nearest nearest;
    char hint[NEAREST_HINT_SIZE];

    nearest_begin(&nearest, word);
    for (; *names; names++) {
        nearest_look(&nearest, *names);
    }
    nearest_hint(&nearest, hint);
    report("%s '%s' is not known%s see %s", what, word, *hint ? hint : ";", where);
}

int next_option(int argc, char **argv, const char *letters, const struct option *names)
{
    int option;

    opterr = 0;
    option = getopt_long(argc, argv, letters, names, NULL);
    if (option == ':' || option == '?') {
        const char *given = argv[optind - 1], *word;
        const char *problem = option == ':' ? "needs a value" : "is not known or not complete";

        if (given[0] == '-' && given[1] == '-') {
            report("%s: option '%s' %s; see '%s %s --help'", argv[0], given, problem,
                   program_invocation_short_name, argv[0]);
        } else if (isdigit(optopt) && (word = word_with(argc, argv, optopt))) {
            report("%s: '%s' is no option, and no size either, as a size has no sign", argv[0],
                   word);
        } else {
            report("%s: option '-%c' %s; see '%s %s --help'", argv[0], optopt, problem,
                   program_invocation_short_name, argv[0]);
        }
        return '?';
    }
    return option;
}

/* The part of "FILE SIZE" behind so many words. */
static const char *names_after(const char *names, int words)
{
    while (words-- > 0) {
        names += strcspn(names, " ");
        names += strspn(names, " ");
    }
    return names;
}

bool check_operands(int argc, char **argv, int least, int most, const char *names)
{
    int given = argc - optind;

    if (given > most) {
        report("%s: '%s' is one word too many after %s; see '%s %s --help'", argv[0],
               argv[optind + most], names, program_invocation_short_name, argv[0]);
    } else if (given < least) {
        report("%s: %s is missing; see '%s %s --help'", argv[0], names_after(names, given),
               program_invocation_short_name, argv[0]);
    }
    return given >= least && given <= most;
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

/* 'G' of "5 GB" */
static char unit_of(const char *text)
{
    return (char)toupper((unsigned char)text[strcspn(text, "KMGTPEkmgtpe")]);
}

int parse_size_of(const char *what, const char *text, uint64_t *size, struct pcow_error *error)
{
    int number = (int)strcspn(text, " KMGTPEkmgtpe");

    switch (parse_size(text, size)) {
    case SIZE_OK: return 0;
    case SIZE_TOO_LARGE: return fail(error, -ERANGE, "%s '%s' is too large", what, text);
    case SIZE_SIGNED:
        return fail(error, -EINVAL, "%s '%s' has a sign, which a size has not: write %s", what,
                    text, text + 1);
    case SIZE_DECIMAL:
        return fail(error, -EINVAL,
                    "%s '%s' could count in 1000 or in 1024: write %.*s%c or %.*s%ciB, which count "
                    "in 1024, or a number of bytes",
                    what, text, number, text, unit_of(text), number, text, unit_of(text));
    default:
        return fail(error, -EINVAL,
                    "%s '%s' is not a size: write a number of bytes, or one with K, M, G, T, P or "
                    "E, which count in 1024",
                    what, text);
    }
}

bool parse_size_option(const char *what, const char *text, uint64_t *size)
{
    struct pcow_error error;

    if (parse_size_of(what, text, size, &error)) {
        report("%s", error.message);
        return false;
    }
    return true;
}

int round_virtual_size(uint64_t *size, bool quiet, struct pcow_error *error)
{
    uint64_t rounded;

    if (*size == 0 || *size > PCOW_MAX_VIRTUAL_SIZE) {
        return fail(error, -EINVAL,
                    "image size %" PRIu64
                    " is out of range: it must be at least 1 byte and at most "
                    "%" PRIu64 " (16T)",
                    *size, PCOW_MAX_VIRTUAL_SIZE);
    }
    rounded = round_up(*size, PCOW_SLAB_SIZE);
    if (rounded != *size && !quiet) {
        report("note: image size %" PRIu64 " rounded up to %" PRIu64 ", a multiple of 2 MiB", *size,
               rounded);
    }
    *size = rounded;
    return 0;
}
