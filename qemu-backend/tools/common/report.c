/* SPDX-License-Identifier: BSD-3-Clause */
#include "report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/utf8.h"

int fail(struct pcow_error *error, int code, const char *format, ...)
{
    va_list arguments;

    if (error) {
        error->code = code;
        va_start(arguments, format);
        vsnprintf(error->message, sizeof(error->message), format, arguments);
        va_end(arguments);
    }
    return code;
}

/*
 * How many bytes at text a terminal would obey in place of showing them, or are no character: C0,
 * DEL, C1 in UTF-8, and what an 8-bit terminal takes for C1.
 */
static size_t obeyed(const char *text)
{
    const unsigned char *byte = (const unsigned char *)text;
    size_t length = utf8_sequence(text);

    if (length == 0) {
        return 1;
    }
    if (length == 1) {
        return *byte < 0x20 || *byte == 0x7f;
    }
    return length == 2 && byte[0] == 0xc2 && byte[1] < 0xa0 ? 2 : 0;
}

static void make_printable(char *text)
{
    while (*text) {
        size_t length = obeyed(text);

        if (length == 0) {
            text += utf8_sequence(text);
            continue;
        }
        memset(text, '?', length);
        text += length;
    }
}

void report(const char *format, ...)
{
    char text[sizeof(((struct pcow_error *)0)->message) + 256];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    make_printable(text);
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, text);
}

int report_error(const struct pcow_error *error)
{
    report("%s", error->message);
    return EXIT_FAILURE;
}

void print_text(const char *text)
{
    while (*text) {
        size_t bad = obeyed(text), length = bad ? bad : utf8_sequence(text);

        if (bad) {
            putchar('?');
        } else {
            fwrite(text, 1, length, stdout);
        }
        text += length;
    }
}
