/* SPDX-License-Identifier: BSD-3-Clause */
#include "report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

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

static void make_printable(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        if (*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
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
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        putchar(*c < 0x20 || *c == 0x7f ? '?' : *c);
    }
}
