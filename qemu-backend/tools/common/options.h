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
 * The next pair of a list "key=value,key=value" (",," stands for a comma in a value); the list is
 * changed. Returns 1 and the pair, 0 at the end, -EINVAL if a piece has no "=".
 */
int next_key_value(char **list, char **key, char **value, struct pcow_error *error);

/*
 * Add more to a list that several -o make up; *list is NULL at first and freed by the caller. False
 * if memory is short.
 */
bool append_key_values(char **list, const char *more);

/* "human" or "json"; anything else is reported and false is returned. */
bool parse_output(const char *text, bool *json);

/* A size with a message that names what it is for; false if there was one. */
bool parse_size_option(const char *what, const char *text, uint64_t *size);

#endif
