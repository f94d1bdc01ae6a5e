/* SPDX-License-Identifier: BSD-3-Clause */
#include "util/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int error_set(struct pcow_error *error, int code, const char *format, ...)
{
    if (error) {
        va_list args;

        va_start(args, format);
        vsnprintf(error->message, sizeof error->message, format, args);
        va_end(args);
        error->code = code;
    }
    return code;
}

int error_set_errno(struct pcow_error *error, int code, const char *format, ...)
{
    if (error) {
        va_list args;
        size_t used;

        va_start(args, format);
        vsnprintf(error->message, sizeof error->message, format, args);
        va_end(args);
        error->code = code;
        used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used, ": %s", strerror(-code));
    }
    return code;
}
