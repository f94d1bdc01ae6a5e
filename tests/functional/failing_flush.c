// SPDX-License-Identifier: Apache-2.0
/*
 * LD_PRELOAD: while the file $FAIL_FLUSH exists, the one call of msync() or fdatasync() fails whose
 * number is in it, counted from 0 since it was first seen.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool fails(void)
{
    static int left = -1;
    FILE *file = fopen(getenv("FAIL_FLUSH"), "r");
    int number;

    if (!file)
        return false;
    if (left < 0 && fscanf(file, "%d", &number) == 1)
        left = number + 1;
    fclose(file);
    return left > 0 && --left == 0;
}

int fdatasync(int fd)
{
    if (fails()) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fdatasync, fd);
}

int msync(void *address, size_t length, int flags)
{
    if (fails()) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_msync, address, length, flags);
}
