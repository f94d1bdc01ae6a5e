/* SPDX-License-Identifier: BSD-3-Clause */
/* The word that was probably meant: the nearest of those that there are. */
#ifndef PCOW_UTIL_NEAREST_H
#define PCOW_UTIL_NEAREST_H

#include <stddef.h>

#define NEAREST_MAX_LENGTH 127         /* longer words are near to none */
#define NEAREST_HINT_SIZE (NEAREST_MAX_LENGTH + 32)

struct nearest {
    const char *word;                  /* what was given */
    const char *found;                 /* NULL: nothing is near */
    size_t distance;                   /* of found; else the first one that is too far */
};

void nearest_begin(struct nearest *nearest, const char *word);

/* candidate must live as long as *nearest. */
void nearest_look(struct nearest *nearest, const char *candidate);

/* ": did you mean 'FOUND'?", or "" */
const char *nearest_hint(const struct nearest *nearest, char hint[NEAREST_HINT_SIZE]);

#endif
