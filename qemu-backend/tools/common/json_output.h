/* SPDX-License-Identifier: BSD-3-Clause */
/* Writing JSON that scripts can trust: text is always valid UTF-8. */
#ifndef TOOLS_JSON_OUTPUT_H
#define TOOLS_JSON_OUTPUT_H

#include <json.h>
#include <stdbool.h>
#include <stdint.h>

/* A member of object; bytes of text that are not UTF-8 (file names may hold any) become U+FFFD. */
void json_put_text(json_object *object, const char *key, const char *text);
void json_put_size(json_object *object, const char *key, uint64_t size);
void json_put_bool(json_object *object, const char *key, bool value);

/*
 * Print object on stdout, pretty, with a newline, and release it. Returns EXIT_SUCCESS, or
 * EXIT_FAILURE with a report.
 */
int json_print(json_object *object);

#endif
