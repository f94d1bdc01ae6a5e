/* SPDX-License-Identifier: BSD-3-Clause */
#include "json_output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "util/utf8.h"

void json_put_text(json_object *object, const char *key, const char *text)
{
    char *clean = malloc(3 * strlen(text) + 1), *end = clean;

    if (!clean) {
        report("out of memory");
        exit(EXIT_FAILURE);
    }
    while (*text) {
        size_t length = utf8_sequence(text);

        if (length) {
            memcpy(end, text, length);
            end += length;
            text += length;
        } else {
            memcpy(end, UTF8_REPLACEMENT, 3);
            end += 3;
            text++;
        }
    }
    *end = '\0';
    json_object_object_add(object, key, json_object_new_string(clean));
    free(clean);
}

void json_put_size(json_object *object, const char *key, uint64_t size)
{
    json_object_object_add(object, key,
                           json_object_new_int64(size > INT64_MAX ? INT64_MAX : (int64_t)size));
}

void json_put_bool(json_object *object, const char *key, bool value)
{
    json_object_object_add(object, key, json_object_new_boolean(value));
}

int json_print(json_object *object)
{
    int status = EXIT_SUCCESS;
    const int flags =
        JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_SPACED | JSON_C_TO_STRING_NOSLASHESCAPE;

    if (puts(json_object_to_json_string_ext(object, flags)) < 0 || fflush(stdout)) {
        report("could not write the output");
        status = EXIT_FAILURE;
    }
    json_object_put(object);
    return status;
}
