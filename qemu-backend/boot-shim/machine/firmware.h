/* SPDX-License-Identifier: BSD-3-Clause */
/* What firmware has told of the machine. */
#ifndef SHIM_MACHINE_FIRMWARE_H
#define SHIM_MACHINE_FIRMWARE_H

#include "config/fail.h"

#define PARAMS_SIZE 4096

/* The zero page (struct boot_params) of this kernel. */
int firmware_params(unsigned char params[PARAMS_SIZE], struct failure *failure);

#endif
