/* SPDX-License-Identifier: BSD-3-Clause */
#include "size.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define MAX_SIZE ((uint64_t)INT64_MAX)

static const char units[] = "kmgtpe";

/* What stands behind the number: SIZE_OK and the power of two. */
static enum size_verdict parse_unit(const char *text, unsigned *shift)
{
    const char *found;

    *shift = 0;
    if (*text == '\0') {
        return SIZE_OK;
    }
    text += strspn(text, " ");
    if (!strcasecmp(text, "b")) {
        return SIZE_OK;
    }
    found = *text ? strchr(units, tolower((unsigned char)*text)) : NULL;
    if (!found) {
        return SIZE_NONE;
    }
    *shift = 10 * (unsigned)(found - units + 1);
    text++;
    if (*text == '\0' || !strcasecmp(text, "ib")) {
        return SIZE_OK;
    }
    return !strcasecmp(text, "b") ? SIZE_DECIMAL : SIZE_NONE;
}

/*
 * Digits after the point as a part of 2^shift, the part of a byte cut off. From the last one on:
 * what each division cuts off does not reach the result, and nothing exceeds 10 * 2^60.
 */
static uint64_t fraction_of(const char *digits, size_t count, unsigned shift)
{
    uint64_t fraction = 0;

    while (count-- > 0) {
        fraction = (fraction + ((uint64_t)(digits[count] - '0') << shift)) / 10;
    }
    return fraction;
}

static unsigned digit_value(char c)
{
    return isdigit((unsigned char)c) ? (unsigned)(c - '0') : (unsigned)(tolower(c) - 'a' + 10);
}

/* *value stays at what is too large. */
static const char *parse_number(const char *text, unsigned base, uint64_t *value)
{
    *value = 0;
    while (base == 16 ? isxdigit((unsigned char)*text) : isdigit((unsigned char)*text)) {
        if (*value <= MAX_SIZE) {
            *value = *value > MAX_SIZE / base ? UINT64_MAX : *value * base + digit_value(*text);
        }
        text++;
    }
    return text;
}

static enum size_verdict parse_hexadecimal(const char *digits, uint64_t *size)
{
    const char *end = parse_number(digits, 16, size);

    if (end == digits || *end != '\0') {
        return SIZE_NONE;
    }
    return *size > MAX_SIZE ? SIZE_TOO_LARGE : SIZE_OK;
}

static enum size_verdict parse_unsigned(const char *text, uint64_t *size)
{
    const char *end, *digits = NULL;
    enum size_verdict verdict;
    uint64_t value, fraction = 0;
    size_t count = 0;
    unsigned shift;

    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
        return parse_hexadecimal(text + 2, size);
    }
    end = parse_number(text, 10, &value);
    if (end == text) {
        return SIZE_NONE;
    }
    if (*end == '.') {
        digits = end + 1;
        count = strspn(digits, "0123456789");
        end = digits + count;
    }
    verdict = parse_unit(end, &shift);
    if (verdict != SIZE_OK) {
        return verdict;
    }
    if (digits) {
        if (count == 0 || shift == 0) {
            return SIZE_NONE;                  /* a part of a byte */
        }
        fraction = fraction_of(digits, count, shift);
    }
    if (value > MAX_SIZE >> shift) {
        return SIZE_TOO_LARGE;
    }
    *size = (value << shift) + fraction;
    return SIZE_OK;
}

enum size_verdict parse_size(const char *text, uint64_t *size)
{
    uint64_t value = 0;
    bool has_sign = *text == '-' || *text == '+';
    enum size_verdict verdict = parse_unsigned(text + has_sign, &value);

    if (has_sign) {
        return verdict == SIZE_NONE ? SIZE_NONE : SIZE_SIGNED;
    }
    if (verdict == SIZE_OK) {
        *size = value;
    }
    return verdict;
}

uint64_t round_up(uint64_t size, uint64_t alignment)
{
    return (size + alignment - 1) & ~(alignment - 1);
}

const char *format_size(uint64_t size, char text[SIZE_TEXT_LENGTH])
{
    static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    int exponent;

    /* 1000 and not 1024 is where the unit changes, so that three digits are enough */
    frexp((double)size / (1000.0 / 1024.0), &exponent);
    exponent = exponent > 0 ? (exponent - 1) / 10 : 0;
    snprintf(text, SIZE_TEXT_LENGTH, "%0.3g %s", ldexp((double)size, -10 * exponent),
             names[exponent]);
    return text;
}

const char *format_size_decimals(double size, char text[SIZE_TEXT_LENGTH])
{
    static const char *const names[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    char number[SIZE_TEXT_LENGTH - 8];
    unsigned unit = 0;
    size_t length;

    while (size >= 1024 && unit < sizeof(names) / sizeof(names[0]) - 1) {
        size /= 1024;
        unit++;
    }
    length = (size_t)snprintf(number, sizeof(number), "%.3f", size);
    if (length > 4 && length < sizeof(number) && !strcmp(number + length - 4, ".000")) {
        number[length - 4] = '\0';
    }
    snprintf(text, SIZE_TEXT_LENGTH, "%s %s", number, names[unit]);
    return text;
}
