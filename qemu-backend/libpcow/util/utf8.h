/* SPDX-License-Identifier: BSD-3-Clause */
/* Text for JSON, which is UTF-8: file names, and what an image says, may be any bytes. */
#ifndef PCOW_UTIL_UTF8_H
#define PCOW_UTIL_UTF8_H

#include <stddef.h>

/* What stands for a byte that is none of UTF-8. */
#define UTF8_REPLACEMENT "\xef\xbf\xbd"

/* Length of the well-formed UTF-8 sequence at text, 0 if there is none. */
static inline size_t utf8_sequence(const char *text)
{
    static const struct {
        unsigned char first_low, first_high, second_low, second_high, length;
    } forms[] = {
        {0x01, 0x7f, 0x00, 0x00, 1}, {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    const unsigned char *bytes = (const unsigned char *)text;

    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        size_t length;

        if (bytes[0] < forms[i].first_low || bytes[0] > forms[i].first_high)
            continue;
        if (forms[i].length > 1
            && (bytes[1] < forms[i].second_low || bytes[1] > forms[i].second_high))
            return 0;
        for (length = 2; length < forms[i].length; length++)
            if (bytes[length] < 0x80 || bytes[length] > 0xbf)
                return 0;
        return forms[i].length;
    }
    return 0;
}

#endif
