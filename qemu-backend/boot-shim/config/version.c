/* SPDX-License-Identifier: BSD-3-Clause */
#include "config/version.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static const char *skip(const char *at)
{
    while (*at && !is_digit(*at) && !is_letter(*at) && !strchr("~-^.", *at))
        at++;
    return at;
}

static size_t run_length(const char *at, bool digits)
{
    size_t length = 0;

    while (digits ? is_digit(at[length]) : is_letter(at[length]))
        length++;
    return length;
}

/* Segments of digits or of letters; moves behind them. */
static int compare_segment(const char **a, const char **b)
{
    bool digits = is_digit(**a) || is_digit(**b);
    size_t x, y;
    int order;

    /* a number is newer than letters */
    if (digits && is_digit(**a) != is_digit(**b))
        return is_digit(**a) ? 1 : -1;
    while (digits && **a == '0')
        (*a)++;
    while (digits && **b == '0')
        (*b)++;
    x = run_length(*a, digits);
    y = run_length(*b, digits);
    if (digits && x != y)
        return x < y ? -1 : 1;
    order = strncmp(*a, *b, x < y ? x : y);
    if (!order && x != y)
        order = x < y ? -1 : 1;
    *a += x;
    *b += y;
    return order;
}

int version_compare(const char *a, const char *b)
{
    for (;;) {
        int order;

        a = skip(a);
        b = skip(b);
        if (*a == '~' || *b == '~') {
            if (*a != *b)
                return *a == '~' ? -1 : 1;
            a++, b++;
            continue;
        }
        if (!*a || !*b)
            return (*a != '\0') - (*b != '\0');
        for (const char *mark = "-^."; *mark; mark++) {
            if (*a != *mark && *b != *mark)
                continue;
            if (*a != *b)
                return *a == *mark ? -1 : 1;
            a++, b++;
            break;
        }
        order = compare_segment(&a, &b);
        if (order)
            return order;
    }
}
