/* SPDX-License-Identifier: BSD-3-Clause */
#include "util/nearest.h"

#include <stdio.h>
#include <string.h>

#define ROW (NEAREST_MAX_LENGTH + 1)

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/*
 * Letters that are put in, left out, changed, or exchanged with their neighbour, between words of
 * at most NEAREST_MAX_LENGTH bytes.
 */
static size_t distance(const char *a, size_t a_length, const char *b, size_t b_length)
{
    size_t rows[3][ROW], *before = rows[0], *last = rows[1], *row = rows[2], *unused;

    for (size_t j = 0; j <= b_length; j++)
        last[j] = j;
    memcpy(before, last, sizeof rows[0]);
    for (size_t i = 1; i <= a_length; i++) {
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t changed = last[j - 1] + (a[i - 1] != b[j - 1]);

            row[j] = least(changed, least(last[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = least(row[j], before[j - 2] + 1);
        }
        unused = before;
        before = last;
        last = row;
        row = unused;
    }
    return last[b_length];
}

void nearest_begin(struct nearest *nearest, const char *word)
{
    *nearest = (struct nearest){.word = word, .distance = (strlen(word) + 1) / 3 + 1};
}

void nearest_look(struct nearest *nearest, const char *candidate)
{
    size_t length = strlen(nearest->word), other = strlen(candidate), found;

    if (length > NEAREST_MAX_LENGTH || other > NEAREST_MAX_LENGTH)
        return;
    found = distance(nearest->word, length, candidate, other);
    if (found < nearest->distance) {
        nearest->found = candidate;
        nearest->distance = found;
    }
}

const char *nearest_hint(const struct nearest *nearest, char hint[NEAREST_HINT_SIZE])
{
    *hint = '\0';
    if (nearest->found)
        snprintf(hint, NEAREST_HINT_SIZE, ": did you mean '%s'?", nearest->found);
    return hint;
}
