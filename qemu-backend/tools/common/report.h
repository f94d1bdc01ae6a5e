/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How the tools say that something went wrong: one line on stderr that begins with the name of the
 * program.
 */
#ifndef TOOLS_REPORT_H
#define TOOLS_REPORT_H

#include <pcow.h>

/* Fill error and return code (a negative errno). */
int fail(struct pcow_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * "pcow-img: MESSAGE" on stderr; control characters, which may come from a hostile image, are shown
 * as '?'.
 */
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Report error and return EXIT_FAILURE. */
int report_error(const struct pcow_error *error);

/* Print text from an image on stdout without its control characters. */
void print_text(const char *text);

#endif
