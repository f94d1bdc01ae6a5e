/* SPDX-License-Identifier: BSD-3-Clause */
#include "uuid.h"

#include <stdio.h>

const char *format_uuid(const uint8_t uuid[PCOW_UUID_SIZE], char text[UUID_TEXT_LENGTH])
{
    char *end = text;

    for (unsigned i = 0; i < PCOW_UUID_SIZE; i++) {
        end += sprintf(end, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    }
    return text;
}
