/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Command lines: getopt_long() with one clear line for each mistake, and "-o key=value,..." lists.
 */
#ifndef TOOLS_OPTIONS_H
#define TOOLS_OPTIONS_H

#include <getopt.h>
#include <pcow.h>
#include <stdbool.h>

/*
 * The next option of argv, whose argv[0] is the name of the command; -1 at the end. A mistake has
 * been reported when '?' is returned. letters begins with ':'.
 */
int next_option(int argc, char **argv, const char *letters, const struct option *names);

/*
 * Whether least to most operands are left at optind; else what is missing, or is too much, is
 * reported. names: of the most operands, with a blank between them.
 */
bool check_operands(int argc, char **argv, int least, int most, const char *names);

/*
 * The next pair of a list "key=value,key=value" (",," stands for a comma in a value); the list is
 * changed. Returns 1 and the pair, 0 at the end, -EINVAL if a piece has no "=".
 */
int next_key_value(char **list, char **key, char **value, struct pcow_error *error);

/*
 * Add more to a list that several -o make up; *list is NULL at first and freed by the caller. False
 * if memory is short.
 */
bool append_key_values(char **list, const char *more);

/*
 * Report that the word is none of names, NULL at their end, and which was probably meant. where
 * tells them all: "'pcow-img --help'".
 */
void report_unknown(const char *what, const char *word, const char *const *names,
                    const char *where);

/* "human" or "json"; anything else is reported and false is returned. */
bool parse_output(const char *text, bool *json);

/* A size; -EINVAL or -ERANGE, and the message names what it is for. */
int parse_size_of(const char *what, const char *text, uint64_t *size, struct pcow_error *error);

/* The same; false after a report. */
bool parse_size_option(const char *what, const char *text, uint64_t *size);

/*
 * Round a virtual size up to the unit of pcow and say so, unless quiet.
 * -EINVAL: zero or above the limit.
 */
int round_virtual_size(uint64_t *size, bool quiet, struct pcow_error *error);

#endif
