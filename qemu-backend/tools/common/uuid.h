/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef TOOLS_UUID_H
#define TOOLS_UUID_H

#include <pcow.h>

#define UUID_TEXT_LENGTH 37

/* "b5b6f2f4-0f1c-4d0c-9a39-8d0dc8fd5c52" */
const char *format_uuid(const uint8_t uuid[PCOW_UUID_SIZE], char text[UUID_TEXT_LENGTH]);

#endif
