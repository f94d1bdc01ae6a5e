/* SPDX-License-Identifier: BSD-3-Clause */
/* What firmware has told of the machine. */
#ifndef SHIM_MACHINE_FIRMWARE_H
#define SHIM_MACHINE_FIRMWARE_H

#include <stdint.h>

#include "config/fail.h"

#define PARAMS_SIZE 4096

/* The zero page (struct boot_params) of this kernel. */
int firmware_params(unsigned char params[PARAMS_SIZE], struct failure *failure);

/*
 * Fill in the screen of a zero page that has none, from the start of the BIOS data area (0x400):
 * QEMU enters a kernel without compression past the code that asks the BIOS.
 */
#define BIOS_DATA_SIZE 256
void firmware_screen(unsigned char *params, const unsigned char bios_data[BIOS_DATA_SIZE]);

#endif
