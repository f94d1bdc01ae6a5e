/* SPDX-License-Identifier: BSD-3-Clause */
/* Errors: a negative errno and one sentence for a human. */
#ifndef PCOW_UTIL_ERROR_H
#define PCOW_UTIL_ERROR_H

#include "pcow.h"

/*
 * Fill *error (may be NULL) and return code, so that callers can "return error_set(...)". code is a
 * negative errno.
 */
int error_set(struct pcow_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same with ": <strerror>" appended. */
int error_set_errno(struct pcow_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
