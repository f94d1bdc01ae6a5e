/* SPDX-License-Identifier: BSD-3-Clause */
#include "size.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char suffixes[] = "bkmgtpe";

static int parse_suffix(const char *suffix, unsigned *shift)
{
    const char *found;

    *shift = 0;
    if (*suffix == '\0') {
        return 0;
    }
    found = strchr(suffixes, tolower((unsigned char)*suffix));
    if (!found || suffix[1] != '\0') {
        return -EINVAL;
    }
    *shift = 10 * (unsigned)(found - suffixes);
    return 0;
}

/* "1.5G": exact enough, because a fraction of a byte is cut off. */
static int parse_fraction(const char *text, uint64_t *size)
{
    unsigned shift;
    double value;
    char *end;

    errno = 0;
    value = strtod(text, &end);
    if (errno || parse_suffix(end, &shift)) {
        return -EINVAL;
    }
    value = ldexp(value, (int)shift);
    if (!(value < 9223372036854775808.0)) {
        return -ERANGE;
    }
    *size = (uint64_t)value;
    return 0;
}

int parse_size(const char *text, uint64_t *size)
{
    bool hexadecimal = text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
    unsigned long long value;
    unsigned shift = 0;
    char *end;

    if (!isdigit((unsigned char)text[0])) {
        return -EINVAL;
    }
    errno = 0;
    value = strtoull(text, &end, hexadecimal ? 16 : 10);
    if (errno) {
        return -errno;
    }
    if (hexadecimal ? *end != '\0' : *end == '.') {
        return hexadecimal ? -EINVAL : parse_fraction(text, size);
    }
    if (parse_suffix(end, &shift)) {
        return -EINVAL;
    }
    if (value > (uint64_t)INT64_MAX >> shift) {
        return -ERANGE;
    }
    *size = (uint64_t)value << shift;
    return 0;
}

uint64_t round_up(uint64_t size, uint64_t alignment)
{
    return (size + alignment - 1) & ~(alignment - 1);
}

const char *format_size(uint64_t size, char text[SIZE_TEXT_LENGTH])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    int exponent;

    /* 1000 and not 1024 is where the unit changes, so that three digits are enough */
    frexp((double)size / (1000.0 / 1024.0), &exponent);
    exponent = exponent > 0 ? (exponent - 1) / 10 : 0;
    snprintf(text, SIZE_TEXT_LENGTH, "%0.3g %s", ldexp((double)size, -10 * exponent),
             units[exponent]);
    return text;
}

const char *format_size_decimals(double size, char text[SIZE_TEXT_LENGTH])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    char number[SIZE_TEXT_LENGTH - 8];
    unsigned unit = 0;
    size_t length;

    while (size >= 1024 && unit < sizeof(units) / sizeof(units[0]) - 1) {
        size /= 1024;
        unit++;
    }
    length = (size_t)snprintf(number, sizeof(number), "%.3f", size);
    if (length > 4 && length < sizeof(number) && !strcmp(number + length - 4, ".000")) {
        number[length - 4] = '\0';
    }
    snprintf(text, SIZE_TEXT_LENGTH, "%s %s", number, units[unit]);
    return text;
}
