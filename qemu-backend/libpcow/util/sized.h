/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Structures of a program that was compiled with another version of pcow.h. They only ever grow, so
 * the shorter one is the beginning of the longer one; the same rules as openat2(2) and clone3(2).
 */
#ifndef PCOW_UTIL_SIZED_H
#define PCOW_UTIL_SIZED_H

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "util/error.h"

/*
 * What a program asks for: it knows nothing of what it does not have, which is 0. -E2BIG: it asks
 * for something that this library does not know.
 */
static inline int sized_take(void *own, size_t own_size, const void *given, size_t given_size,
                             struct pcow_error *error)
{
    const unsigned char *bytes = given;

    for (size_t i = own_size; i < given_size; i++)
        if (bytes[i])
            return error_set(error, -E2BIG,
                             "the program was made for a newer libpcow than this, and asks for "
                             "what is not there: update libpcow");
    memset(own, 0, own_size);
    memcpy(own, given, given_size < own_size ? given_size : own_size);
    return 0;
}

/* What it is told: as much as it has room for; what this library does not know is 0. */
static inline void sized_give(void *given, size_t given_size, const void *own, size_t own_size)
{
    size_t known = given_size < own_size ? given_size : own_size;

    memcpy(given, own, known);
    memset((unsigned char *)given + known, 0, given_size - known);
}

#endif
