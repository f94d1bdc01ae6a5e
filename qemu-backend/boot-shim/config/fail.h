/* SPDX-License-Identifier: BSD-3-Clause */
/* Errors: a negative errno and one sentence for whoever looks at the console. */
#ifndef SHIM_CONFIG_FAIL_H
#define SHIM_CONFIG_FAIL_H

struct failure {
    char text[512];
};

/* Fill *failure and return code. What is no printable ASCII becomes '?': guests name files. */
int fail_with(struct failure *failure, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Replace, in place, what a console could take for a command. */
void make_printable(char *text);

#endif
