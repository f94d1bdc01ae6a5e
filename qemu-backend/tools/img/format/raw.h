/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef IMG_RAW_H
#define IMG_RAW_H

#include <pcow.h>

/* Bytes of a regular file or block device; anything else is refused. */
int raw_size(int fd, const char *path, uint64_t *size, struct pcow_error *error);

#endif
