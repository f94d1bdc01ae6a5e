/* SPDX-License-Identifier: BSD-3-Clause */
#include "json_output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

/* Length of the well-formed UTF-8 sequence at text, 0 if there is none. */
static size_t utf8_sequence(const unsigned char *text)
{
    static const struct {
        unsigned char first_low, first_high, second_low, second_high, length;
    } forms[] = {
        {0x01, 0x7f, 0x00, 0x00, 1}, {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };

    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        size_t length = 1;

        if (text[0] < forms[i].first_low || text[0] > forms[i].first_high) {
            continue;
        }
        if (forms[i].length > 1
            && (text[1] < forms[i].second_low || text[1] > forms[i].second_high)) {
            return 0;
        }
        for (length = 2; length < forms[i].length; length++) {
            if (text[length] < 0x80 || text[length] > 0xbf) {
                return 0;
            }
        }
        return forms[i].length;
    }
    return 0;
}

void json_put_text(json_object *object, const char *key, const char *text)
{
    static const char replacement[] = "\xef\xbf\xbd";
    char *clean = malloc(3 * strlen(text) + 1), *end = clean;

    if (!clean) {
        report("out of memory");
        exit(EXIT_FAILURE);
    }
    while (*text) {
        size_t length = utf8_sequence((const unsigned char *)text);

        if (length) {
            memcpy(end, text, length);
            end += length;
            text += length;
        } else {
            memcpy(end, replacement, 3);
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
