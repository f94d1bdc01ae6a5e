/* SPDX-License-Identifier: BSD-3-Clause */
/* What runs between two kernels. */
#ifndef SHIM_MACHINE_STUB_H
#define SHIM_MACHINE_STUB_H

#include <stdint.h>

#define STUB_SIZE (8 * 4096)

/* Little endian, as the machine is. */
void put32(unsigned char *at, uint64_t value);
void put64(unsigned char *at, uint64_t value);

/*
 * Make the stub for an address that is a multiple of 4096. It is entered there, and enters the
 * kernel at entry with its zero page at params; all of that is below 4 GiB.
 */
void stub_make(unsigned char stub[STUB_SIZE], uint64_t address, uint64_t params, uint64_t entry);

#endif
