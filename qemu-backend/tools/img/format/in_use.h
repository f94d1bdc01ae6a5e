/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef IMG_IN_USE_H
#define IMG_IN_USE_H

#include <pcow.h>

/*
 * -EBUSY if another process holds a lock on the open file, as QEMU and libpcow do on images that
 * they use.
 */
int check_not_in_use(int fd, const char *path, struct pcow_error *error);

#endif
