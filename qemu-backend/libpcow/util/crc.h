/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Checksums of the format: CRC-32C (Castagnoli, RFC 3720 appendix B.4) for records, CRC-8
 * (polynomial 0x07) for words.
 */
#ifndef PCOW_UTIL_CRC_H
#define PCOW_UTIL_CRC_H

#include <stddef.h>
#include <stdint.h>

uint32_t crc32c(const void *data, size_t length);
/* Of data that follow what has this checksum. With the CPU's instruction where it has one. */
uint32_t crc32c_of_more(uint32_t crc, const void *data, size_t length);

/* CRC-8 of the low seven bytes of value, least significant first, initial value 0xff. */
uint8_t crc8_of_word(uint64_t value);

#endif
