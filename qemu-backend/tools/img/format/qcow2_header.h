/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef IMG_QCOW2_HEADER_H
#define IMG_QCOW2_HEADER_H

#include <pcow.h>

/*
 * Look at the header of a qcow2 file before QEMU does: refused are files that are none, that name
 * another file (backing file, external data file: the path may be hostile), or that are encrypted.
 * shown_path: what errors call it.
 */
int qcow2_check_header(const char *path, const char *shown_path, struct pcow_error *error);

#endif
