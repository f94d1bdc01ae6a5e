// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: a pool on a file system that does not answer any more, as one of a server that is
 * gone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/statvfs.h>

int fstatvfs64(int fd, struct statvfs64 *result)
{
    (void)fd;
    (void)result;
    errno = ESTALE;
    return -1;
}
