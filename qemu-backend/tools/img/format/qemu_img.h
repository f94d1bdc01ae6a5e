/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef IMG_QEMU_IMG_H
#define IMG_QEMU_IMG_H

#include <pcow.h>

/*
 * Run qemu-img to its end; arguments[0] is "qemu-img". *status: its exit code, -1 if a signal ended
 * it.
 */
int qemu_img_run(char *const arguments[], bool quiet, int *status, struct pcow_error *error);

#endif
