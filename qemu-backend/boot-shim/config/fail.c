/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/fail.h"

#include <stdarg.h>
#include <stdio.h>

void make_printable(char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

int fail_with(struct failure *failure, int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(failure->text, sizeof failure->text, format, args);
    va_end(args);
    make_printable(failure->text);
    return code;
}
