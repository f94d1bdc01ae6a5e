/* SPDX-License-Identifier: BSD-3-Clause */
/* Sizes as people write and read them, with qemu-img's and qemu-io's conventions. */
#ifndef TOOLS_SIZE_H
#define TOOLS_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIZE_TEXT_LENGTH 32

/*
 * "65536", "64k", "1.5G", "0x1000": a number and one of b, k, M, G, T, P, E (powers of 1024, either
 * case). Returns 0, -EINVAL if text is no size, -ERANGE if it does not fit into 63 bits.
 */
int parse_size(const char *text, uint64_t *size);

/* The next multiple of alignment (a power of two); size must not be near 2^64. */
uint64_t round_up(uint64_t size, uint64_t alignment);

/* qemu-img's way, three significant digits: "196 KiB", "1.5 GiB". */
const char *format_size(uint64_t size, char text[SIZE_TEXT_LENGTH]);

/* qemu-io's way, three decimals unless they are zero: "64 KiB", "8.938 MiB", "32 bytes". */
const char *format_size_decimals(double size, char text[SIZE_TEXT_LENGTH]);

#endif
