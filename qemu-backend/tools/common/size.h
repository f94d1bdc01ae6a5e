/* SPDX-License-Identifier: BSD-3-Clause */
/* Sizes as people write and read them, with qemu-img's and qemu-io's conventions. */
#ifndef TOOLS_SIZE_H
#define TOOLS_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIZE_TEXT_LENGTH 32

enum size_verdict {
    SIZE_OK,
    SIZE_NONE,                                 /* not a size */
    SIZE_SIGNED,                               /* "-5G", "+5G" */
    SIZE_DECIMAL,                              /* "5GB": 1000 or 1024? */
    SIZE_TOO_LARGE,                            /* more than 63 bits */
};

/*
 * "65536", "64k", "1.5G", "2 MiB", "0x1000": a number, in which a part of a byte is cut off, and
 * B, K, M, G, T, P, E or KiB, MiB, ... (powers of 1024, either case). Python's parser
 * (pcow_driver/common/units.py) takes the same; tests/unit/data/sizes.txt is the table of both.
 */
enum size_verdict parse_size(const char *text, uint64_t *size);

/* The next multiple of alignment (a power of two); size must not be near 2^64. */
uint64_t round_up(uint64_t size, uint64_t alignment);

/* qemu-img's way, three significant digits: "196 KiB", "1.5 GiB". */
const char *format_size(uint64_t size, char text[SIZE_TEXT_LENGTH]);

/* qemu-io's way, three decimals unless they are zero: "64 KiB", "8.938 MiB", "32 bytes". */
const char *format_size_decimals(double size, char text[SIZE_TEXT_LENGTH]);

#endif
